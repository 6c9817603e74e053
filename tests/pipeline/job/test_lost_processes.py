"""A process that is killed or hangs is named within seconds in all others; one that is slow is waited for."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gpipe
from gpipe.pipeline.job import watch
from tests.pipeline.job import fresh_processes
from tests.pipeline.job.faults import (
    SECONDS,
    WIRES,
    Event,
    Layer,
    Loss,
    Sleep,
    describe,
    hang,
    kill,
    note_and,
    stop,
    train,
    train_apart,
)
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.alone
SILENT_SECONDS = 4.0  # on a machine that is busy with something else a process may not run for 2


def assert_named(events: dict[int, Event], others: set[int], stage: int | None, text: str) -> None:
    assert set(events) == others, f"{set(events)} noticed"
    for rank, event in events.items():
        assert event.kind == "PeerFailure", f"rank {rank}: {event}"
        assert event.stage == stage and text in event.text, f"rank {rank}: {event.text}"
        assert "\n" not in event.text
        assert event.text in event.again


@WIRES
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_process_that_is_killed_is_named(culprit: int, run: Callable[..., Any], tmp_path: Path) -> None:
    events = fresh_processes.run(3, run, 3, culprit, "forward", partial(note_and, kill, tmp_path / "time"))
    assert_named(events, {0, 1, 2} - {culprit}, culprit, "is gone without a word")
    assert all(f"stage {culprit} (rank {culprit}, process " in event.text for event in events.values())
    assert all("last seen in " in event.text for event in events.values())
    assert max(event.time for event in events.values()) - float((tmp_path / "time").read_text()) < SECONDS


def train_patiently(*args: Any) -> Event | None:
    """Train as `train` does, and wait for ever for the word of a process that may still be there."""
    watch._EXPLANATION_SECONDS = float("inf")
    return train(*args)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is known of the other processes without /proc")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_nobody_waits_for_the_word_of_a_process_that_has_ended(num_replicas: int) -> None:
    events = fresh_processes.run(2 * num_replicas, train_patiently, 2, 1, "backward", kill, 30.0, num_replicas)
    others = {rank for rank in range(2 * num_replicas) if rank != 1}
    assert_named(events, others, 1, "(rank 1, process ")


def test_a_process_of_several_stages_that_is_killed_is_named() -> None:
    events = fresh_processes.run(2, train, 4, 1, "forward", kill, 30.0, 1, 0.0, 2)
    assert_named(events, {0}, None, "the process of stages 1, 3 (rank 1, process ")


def test_a_process_that_is_killed_in_one_replica_is_named_in_all() -> None:
    events = fresh_processes.run(4, train, 2, 2, "backward", kill, 30.0, 2)
    assert_named(events, {0, 1, 3}, 0, "stage 0 of replica 1 (rank 2, process ")


def connect(rank: int, culprit: int, action: Callable[[], None]) -> str:
    """Make a pipeline of three processes, one of which never comes; return what this one is told."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    if rank == culprit:
        action()
    try:
        gpipe.Pipeline(
            nn.Sequential(*map(nn.Linear, [4] * 3, [4] * 3)), Loss(None), [1] * 3, 4, mesh=mesh, timeout_seconds=2
        )
    except gpipe.PeerFailure as error:
        return str(error)
    return "connected"


@pytest.mark.parametrize(("action", "said"), [(hang, "does not answer"), (kill, "")])
def test_a_process_that_never_comes_to_the_pipeline_is_named(action: Callable[[], None], said: str) -> None:
    told = fresh_processes.run(3, connect, 1, action, mute=1)
    assert told.keys() == {0, 2}
    for text in told.values():
        assert "rank 1, which never reported where it runs, " in text and said in text


@pytest.mark.parametrize("action", [hang, stop])
@pytest.mark.parametrize(
    ("where", "culprit", "run"), [("forward", 3, train), ("backward", 1, train), ("backward", 1, train_apart)]
)
def test_a_process_that_hangs_is_named_also_by_those_far_away(
    action: Callable[[], None], where: str, culprit: int, run: Callable[..., Any], tmp_path: Path
) -> None:
    noted = partial(note_and, action, tmp_path / "time")
    events = fresh_processes.run(4, run, 4, culprit, where, noted, SILENT_SECONDS, mute=culprit)
    assert_named(events, {0, 1, 2, 3} - {culprit}, culprit, "does not answer: stage")
    assert (
        max(event.time for event in events.values()) - float((tmp_path / "time").read_text()) < SILENT_SECONDS + SECONDS
    )


def test_a_replica_that_hangs_is_named_in_all() -> None:
    events = fresh_processes.run(4, train, 2, 1, "forward", stop, SILENT_SECONDS, 2, mute=1)
    assert_named(events, {0, 2, 3}, 1, "stage 1 of replica 0 (rank 1, process ")


# Of the second step of 4 micro-batches, after one that made 4 exchanges of statistics forward, 4 back and 1 at the end.
EXCHANGES = {"forward": 12, "backward": 15}


def train_synchronized(
    rank: int, culprit: int, where: str, action: Callable[[], None], timeout_seconds: float, file: Path
) -> Event | None:
    """Train 2 replicas of 2 stages; one process meets its fate in place of a batch norm's exchange.

    It writes the time to a file.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    layers = gpipe.convert_batch_norm(
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    )
    assert isinstance(layers, nn.Sequential)
    pipeline = gpipe.Pipeline(
        layers, Loss(None), [1, 1], 4, mesh=mesh, timeout_seconds=timeout_seconds, synchronize_batch_norm=True
    )
    num_calls, all_gather = 0, dist.all_gather

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == EXCHANGES[where]:
            file.write_text(str(time.monotonic()))
            action()
        return all_gather(*args, **options)

    if rank == culprit:
        dist.all_gather = counted
    try:
        for step in range(3):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(4 * step + pipeline.job.replica_index))
            pipeline.train_step((inputs, torch.ones(8, 4)))
    except Exception as error:  # noqa: BLE001 - it is what the tests look at
        return describe(pipeline, error)
    return None


@pytest.mark.parametrize(
    ("where", "culprit", "action", "timeout_seconds"),
    [("forward", 2, kill, 30.0), ("backward", 0, kill, 30.0), ("backward", 1, stop, SILENT_SECONDS)],
)
def test_a_process_lost_in_an_exchange_of_statistics_is_named_in_all(
    where: str, culprit: int, action: Callable[[], None], timeout_seconds: float, tmp_path: Path
) -> None:
    file, mute = tmp_path / "time", culprit if action is stop else None
    events = fresh_processes.run(
        4, train_synchronized, culprit, where, action, timeout_seconds, file, mute=mute, seconds=60
    )
    replica, stage = divmod(culprit, 2)
    name = f"stage {stage} of replica {replica} (rank {culprit}, process "
    assert_named(events, {0, 1, 2, 3} - {culprit}, stage, name)
    says, seconds = ("is gone without a word", 0) if action is kill else ("does not answer", SILENT_SECONDS)
    assert all(says in event.text for event in events.values())
    assert max(event.time for event in events.values()) - float(file.read_text()) < seconds + SECONDS


def train_slowly(rank: int) -> float:
    """Train with a stage whose forwards take longer, in sum, than a process may be silent."""
    mesh: DeviceMesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    layers = nn.Sequential(Layer(), nn.Sequential(Layer(), Sleep(0.3)), Layer())
    # Twice as long as notes of progress are apart, and as long again for a busy machine.
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1, 1], 8, mesh=mesh, timeout_seconds=2.0)
    loss = pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4))).loss
    pipeline.close()
    return loss


def test_a_stage_that_is_slow_is_not_taken_for_one_that_hangs(pool: ProcessPool) -> None:
    first, *others = pool.run(3, train_slowly)
    assert others == [first, first]


def compile_slowly(rank: int) -> tuple[float, str | None]:
    """Train with a stage that compiles for longer than a process may be silent; return what it is said to do."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # what is loaded once may take long on a busy machine,
    dist.barrier()  # and in one process longer than in another
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1, 1], 2, mesh=mesh, timeout_seconds=2.0)
    seen: list[str | None] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if rank == 2 and not seen:
            seen.append(None)
            time.sleep(4.0)
        return graph

    def look() -> None:
        while pipeline.step == 0 and "compiling layer 3 of 3" not in seen:
            seen.append(pipeline.job.compiling)
            time.sleep(0.05)

    pipeline.compile(backend=backend)
    watcher = threading.Thread(target=look, daemon=True)
    if rank == 0:
        watcher.start()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        loss = pipeline.train_step((torch.ones(4, 4), torch.ones(4, 4))).loss
    pipeline.close()
    return loss, seen[-1] if seen else None


def test_a_stage_that_compiles_is_waited_for_and_the_others_know_what_it_does(pool: ProcessPool) -> None:
    losses, (told, *_) = zip(*pool.run(3, compile_slowly), strict=True)
    assert len(set(losses)) == 1
    assert told == "compiling layer 3 of 3"
