"""A cause of failure comes in the place of whatever a process waits for, also where no other word of it arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.pipeline.job.board import Board
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.wire.transfer import ProcessTransfer
from tests.pipeline.wire.mixed_layers import mean_output, stages
from tests.pipeline.wire.test_local import run_apart
from tests.support.process_pool import ProcessPool


class Fail(nn.Module):
    """Fails in its second call, unless it is of another stage."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fails, self.calls = fails, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ArithmeticError("on purpose")
        return self.linear(x)


def run_and_close(pipeline: gpipe.Pipeline, run: Callable[[], Any]) -> str:
    """Return the failure that comes of it, with its kind; empty if there is none."""
    try:
        run()
    except gpipe.PipelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pipeline.close()
    return ""


def fail(rank: int, culprit: int) -> str:
    with mock.patch.object(Board, "write_first"), mock.patch.object(Messenger, "fail"):
        layers = nn.Sequential(*(Fail(fails=rank == culprit) for _ in range(2)))
        pipeline = gpipe.Pipeline(layers, mean_output, [1, 1], 3, mesh=stages(2), timeout_seconds=30)
        return run_and_close(pipeline, lambda: pipeline.train_step((torch.ones(3, 2), torch.ones(3, 2))))


@pytest.mark.parametrize("is_apart", [False, True], ids=["one host", "hosts"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_cause_of_failure_comes_in_the_place_of_a_payload(
    culprit: int, is_apart: bool, processes: ProcessPool
) -> None:
    run = (run_apart, fail) if is_apart else (fail,)
    text = (
        f"rank {culprit}, stage {culprit}, micro-batch 1, layer {culprit} (Fail), forward: ArithmeticError: on purpose"
    )
    found = processes.run(2, *run, culprit)
    assert found[1 - culprit] == f"PeerFailure: {text}"


def fail_between_steps(rank: int) -> str:
    with mock.patch.object(Board, "write_first"), mock.patch.object(Messenger, "fail"):
        layers = nn.Sequential(Fail(fails=False), Fail(fails=False))
        pipeline = gpipe.Pipeline(layers, mean_output, [1, 1], 3, mesh=stages(2), timeout_seconds=30)
        pipeline.evaluate(torch.ones(300, 2))
        pipeline.train_step((torch.ones(3, 2), torch.ones(3, 2)))
        if rank == 0:
            return run_and_close(pipeline, lambda: pipeline.job.abort(ArithmeticError("no data")))
        return run_and_close(pipeline, lambda: pipeline.evaluate(torch.ones(300, 2)))


@pytest.mark.parametrize("is_apart", [False, True], ids=["one host", "hosts"])
def test_a_cause_comes_in_the_place_of_a_larger_payload_than_its_sender_expected(
    is_apart: bool, processes: ProcessPool
) -> None:
    run = (run_apart, fail_between_steps) if is_apart else (fail_between_steps,)
    text = "PeerFailure: rank 0, stage 0, between two steps: ArithmeticError: no data"
    assert processes.run(2, *run) == ["", text]


def end_silently(transfer: ProcessTransfer, _: dict[str, Any]) -> None:
    for end in (*transfer._senders.values(), *transfer._receivers.values()):
        end.end()


def fail_before_a_gathering(rank: int) -> str:
    with mock.patch.object(Board, "write_first"), mock.patch.object(ProcessTransfer, "fail", end_silently):
        layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        pipeline = gpipe.Pipeline(layers, mean_output, [1, 1, 1], 3, mesh=stages(3), timeout_seconds=30)
        if rank == 1:
            return run_and_close(pipeline, lambda: pipeline.job.abort(ArithmeticError("no data")))
        return run_and_close(pipeline, lambda: pipeline.job.gather(rank))


@pytest.mark.parametrize("is_apart", [False, True], ids=["one host", "hosts"])
def test_a_cause_of_failure_comes_in_the_place_of_a_gathered_value(is_apart: bool, processes: ProcessPool) -> None:
    run = (run_apart, fail_before_a_gathering) if is_apart else (fail_before_a_gathering,)
    text = "PeerFailure: rank 1, stage 1, between two steps: ArithmeticError: no data"
    assert processes.run(3, *run) == [text, "", text]
