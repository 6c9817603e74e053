"""What a process sends is what it was then, whatever becomes of the memory; and what is not sent yet is limited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.pipeline.wire.streams import Sender
from tests.pipeline.wire.mixed_layers import mean_output, stages
from tests.pipeline.wire.test_local import run_apart
from tests.support.process_pool import ProcessPool


class Sum(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] + parts[1]


def evaluate_with_one_mask(rank: int) -> list[float]:
    """Return how far outputs are from those of the mask that was given, whose memory serves again."""
    layers = nn.Sequential(nn.Identity(), Sum())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1), 4, mesh=stages(2), timeout_seconds=20)
    mask, found = torch.zeros(8, 20_000), []
    for number in range(10):
        mask.fill_(number)
        outputs = pipeline.evaluate((torch.zeros(8, 20_000), mask))
        found += [] if outputs is None else [float((outputs - number).abs().max())]
    pipeline.close()
    return found


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


def count_left(rank: int) -> int:
    """Return the most pieces of work that a first stage left to its thread, which a slow second one takes."""
    pipeline = gpipe.Pipeline(
        nn.Sequential(nn.Identity(), Slow()), mean_output, (1, 1), 2, mesh=stages(2), timeout_seconds=20
    )
    senders: list[Sender] = list(pipeline.job.transfer._senders.values())
    most = 0
    for _ in range(10):
        pipeline.evaluate(torch.zeros(2, 2**19))
        most = max(most, *(sender._num_left - sender._num_done for sender in senders))
    pipeline.close()
    return most


WIRES = pytest.mark.parametrize("is_apart", [False, True], ids=["one host", "hosts"])


def run(function: Callable[[int], Any], processes: ProcessPool, *, is_apart: bool) -> list[Any]:
    return processes.run(2, run_apart, function) if is_apart else processes.run(2, function)


@WIRES
def test_inputs_may_be_overwritten_after_an_evaluation(is_apart: bool, processes: ProcessPool) -> None:
    assert run(evaluate_with_one_mask, processes, is_apart=is_apart)[1] == [0.0] * 10


@WIRES
def test_evaluations_do_not_pile_up_in_front_of_a_slow_stage(is_apart: bool, processes: ProcessPool) -> None:
    assert run(count_left, processes, is_apart=is_apart)[0] <= 3, "the payloads of one evaluation, and their format"
