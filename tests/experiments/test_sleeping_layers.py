"""The layers that sleep: how long, in which part of the backward, and with which gradients."""

import time

import pytest
import torch

import gpipe
from experiments.engine_overhead.hand_written_loop import compute_loss
from experiments.engine_overhead.sleeping_layers import SplitSleeper
from gpipe.pipeline.schedule import Kind


@pytest.mark.parametrize("schedule", ["gpipe", "split_gpipe"])
def test_tasks_sleep_as_long_as_they_say(schedule: str) -> None:
    layers = torch.nn.Sequential(SplitSleeper(4, 0.01, 0.02, 0.03))
    pipeline = gpipe.Pipeline(layers, compute_loss, [1], 2, schedule=schedule, rematerialize="never")
    begin = time.perf_counter()
    report = pipeline.train_step((torch.randn(2, 4), torch.randn(2, 4)), record_timeline=True)
    assert time.perf_counter() - begin >= 2 * (0.01 + 0.02 + 0.03)
    assert report.timeline is not None
    for event in report.timeline.events:
        assert event.end - event.start >= layers[0].seconds.of(event.task.kind)
    kinds = {event.task.kind for event in report.timeline.events}
    assert (Kind.WEIGHT_GRADIENTS in kinds) == (schedule == "split_gpipe")
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
