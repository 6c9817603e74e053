"""An error anywhere ends every process of a pipeline within seconds, with the cause; the processes survive it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.pipeline.job.faults import (
    SECONDS,
    WIRES,
    Broken,
    Event,
    Loss,
    raise_error,
    raise_many_lines,
    train,
)
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.alone


def assert_all_stopped(events: list[Event | None], culprit: int, seconds: float = SECONDS) -> list[Event]:
    """Check that all processes met an error in time, and that all but the culprit call it a peer's."""
    assert None not in events, "a process noticed nothing"
    found = [event for event in events if event is not None]
    raised = found[culprit].raised
    assert raised is not None
    for rank, event in enumerate(found):
        assert event.time - raised < seconds, f"rank {rank} went on for {event.time - raised:.1f} s"
        assert rank == culprit or event.kind == "PeerFailure", f"rank {rank}: {event}"
        assert "\n" not in event.text, f"rank {rank}: {event.text}"
        assert event.text.removeprefix("Broken: ") in event.again, f"rank {rank} goes on: {event.again}"
        assert "cannot continue; build a new one" in event.again
    return found


@WIRES
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_an_error_in_a_layer_ends_all_processes_with_its_place(
    where: str, culprit: int, run: Callable[..., Any], pool: ProcessPool
) -> None:
    for rank, event in enumerate(assert_all_stopped(pool.run(3, run, 3, culprit, where), culprit)):
        assert event.is_ours == (rank == culprit), "the user's own type can be caught where it was raised"
        assert (event.stage, event.micro_batch, event.layer) == (culprit, 2, culprit), event
        place = f"rank {culprit}, stage {culprit}, micro-batch 2, layer {culprit} (Layer), {where}: Broken: on purpose"
        assert event.text == place


def count_left(rank: int, run: Callable[..., Any], *args: Any) -> int:
    """Return how many pipelines a training leaves in memory."""

    def count() -> int:
        gc.collect()
        return sum(type(one) is gpipe.Pipeline for one in gc.get_objects())

    before = count()
    run(rank, *args)
    return count() - before


@WIRES
def test_a_pipeline_that_failed_leaves_the_memory_of_every_process(run: Callable[..., Any], pool: ProcessPool) -> None:
    assert pool.run(3, count_left, run, 3, 1, "forward") == [0, 0, 0]


@pytest.mark.parametrize("where", ["forward", "data"])
def test_an_error_in_a_process_of_several_stages_ends_all(where: str, pool: ProcessPool) -> None:
    # All layers of the process are told to fail: its first stage comes first.
    events = pool.run(3, train, 6, 1, where, raise_error, 30.0, 1, 0.0, 2)
    for rank, event in enumerate(assert_all_stopped(events, 1)):
        if where == "forward":
            assert (event.stage, event.layer) == (1, 1)
        elif rank != 1:
            assert (event.stage, event.text) == (None, "rank 1, stages 1, 4, between two steps: Broken: on purpose")


def test_an_error_in_the_loss_ends_all_processes_with_its_place(pool: ProcessPool) -> None:
    for event in assert_all_stopped(pool.run(3, train, 3, 2, "loss"), 2):
        assert (event.stage, event.micro_batch, event.layer) == (2, 2, None), event
        assert event.text == "rank 2, stage 2, micro-batch 2, the loss, loss: Broken: on purpose"


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_error_in_loading_data_ends_all_processes_with_the_cause(culprit: int, pool: ProcessPool) -> None:
    for rank, event in enumerate(assert_all_stopped(pool.run(3, train, 3, culprit, "data"), culprit)):
        if rank == culprit:
            assert (event.kind, event.text) == ("Broken", "on purpose")
        else:
            place = f"rank {culprit}, stage {culprit}, between two steps"
            assert (event.stage, event.text) == (culprit, f"{place}: Broken: on purpose")


def test_the_place_of_an_error_of_many_lines_comes_last(pool: ProcessPool) -> None:
    _, event = pool.run(2, train, 2, 0, "data", raise_many_lines)
    assert event.text == "Broken: on purpose,\nwhere a worker was\n(in rank 0, stage 0, between two steps)"


def fail_twice(rank: int) -> tuple[list[str], str]:
    """Fail beside the steps, and once more; return the notes of the first error, and what a step then says."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("stage",))
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 4)), Loss(None), [1], 2, mesh=mesh, timeout_seconds=30.0)
    first = Broken("first")
    for error in (first, Broken("second")):
        pipeline.job.abort(error)
    with pytest.raises(gpipe.PipelineError) as refused:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    pipeline.close()
    return first.__notes__, str(refused.value)


def test_the_first_error_of_a_process_is_the_cause_and_tells_its_place(pool: ProcessPool) -> None:
    ((notes, said),) = pool.run(1, fail_twice)
    assert notes == ["rank 0, stage 0, between two steps"]
    assert said.endswith("The cause: rank 0, stage 0, between two steps: Broken: first")


@pytest.mark.parametrize("where", ["forward", "backward", "data"])
def test_an_error_in_one_replica_ends_all(where: str, pool: ProcessPool) -> None:
    events = pool.run(4, train, 2, 1, where, raise_error, 30.0, 2)
    for rank, event in enumerate(assert_all_stopped(events, 1)):
        assert rank == 1 or event.stage == 1
        assert "Broken: on purpose" in event.text or rank == 1


class Unfillable(nn.Module):
    """A layer on the meta device that nothing can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))


def fail_before_a_step(rank: int, what: str) -> Event:
    shape = (2, 1) if what == "evaluation" else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage"))
    layers = gpipe.convert_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    if what == "layer":
        layers[1] = Unfillable()
    started = time.monotonic()
    try:
        pipeline = gpipe.Pipeline(
            layers, Loss(None), [2] if what == "evaluation" else [1, 1], 2, mesh=mesh, timeout_seconds=30.0,
            synchronize_batch_norm=True,
        )  # fmt: skip
        inputs = torch.ones(8, 4)
        if what == "evaluation":
            pipeline.evaluate((inputs, torch.ones(3, 4)) if rank == 1 else inputs, move_statistics=True)
        else:
            pipeline.train_step(None if what == "mini-batch" and rank == 1 else (inputs, inputs))
    except (ValueError, TypeError, gpipe.PipelineError) as error:
        found = (error.stage,) if isinstance(error, gpipe.PipelineError) else (None,)
        return Event(type(error).__name__, str(error), *found, None, None, time.monotonic(), started, "", False)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(
    ("what", "said"),
    [("layer", "layers.1 (Unfillable)"), ("evaluation", "the inputs have the shapes"), ("mini-batch", "NoneType")],
)
def test_an_error_before_the_first_task_ends_all_processes_with_the_cause(
    what: str, said: str, pool: ProcessPool
) -> None:
    other, culprit = pool.run(2, fail_before_a_step, what)
    assert said in culprit.text and said in other.text
    assert other.kind == "PeerFailure" and culprit.kind != other.kind
    assert other.time - culprit.time < SECONDS


def test_an_error_reaches_a_stage_that_waits_for_nobody(pool: ProcessPool) -> None:
    # Stage 0 has 4 s of forwards ahead of it when stage 2 fails in the third.
    events = pool.run(3, train, 3, 2, "forward", raise_error, 30.0, 1, 1.0)
    for event in assert_all_stopped(events, 2, 2.5):
        assert event.stage == 2


def raise_in_one(rank: int) -> tuple[list[str], float]:
    """Make the last stage's loss infinite in the second of three steps; return the errors and the number of steps."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1, 1], 4, mesh=mesh, timeout_seconds=10)
    errors, losses = [], []
    for target in (1.0, float("inf"), 1.0):
        try:
            losses.append(pipeline.train_step((torch.ones(8, 4), torch.full((8, 4), target))).loss)
        except gpipe.NonFiniteError as error:
            errors.append(str(error))
        for parameter in pipeline.parameters():
            parameter.grad = None
    pipeline.close()
    assert losses[0] == losses[1], "something was updated"
    return errors, pipeline.step


def test_a_loss_that_is_not_finite_is_raised_on_all_and_all_go_on(pool: ProcessPool) -> None:
    for errors, num_steps in pool.run(3, raise_in_one):
        assert len(errors) == 1 and "the loss of step 1 is inf in stage 2; nothing was updated" in errors[0]
        assert num_steps == 2
