"""A failure anywhere ends every process of a pipeline within seconds, with the cause."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gpipe
from gpipe.pipeline.job import watch
from tests.pipeline.job import fresh_processes
from tests.support.calling_backward import CallingBackward
from tests.support.hosts import host_of_its_own
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.alone
SECONDS = 5.0  # the contract's
SILENT_SECONDS = 4.0  # on a machine that is busy with something else a process may not run for 2


class Broken(ArithmeticError):
    """What the tests raise."""


class Event(NamedTuple):
    """What a process saw last: an error, and when; times are the host's, the same for all processes."""

    kind: str
    text: str
    stage: int | None
    micro_batch: int | None
    layer: int | None
    time: float
    raised: float | None  # when this process itself did the damage
    again: str  # what a further step says
    is_ours: bool  # whether `except Broken` catches it


raised_at: float | None = None


def now() -> None:
    """Note when the damage is done."""
    global raised_at
    raised_at = time.monotonic()


class Layer(nn.Module):
    """A layer that does damage at some micro-batch of the second step, in forward, recomputation or backward."""

    def __init__(self, where: str = "", action: Callable[[], None] = now) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where, self.action = where, action
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        # M = 4: the first step has calls 1 to 4 and recomputes in 5 to 8; micro-batch 2 is called 3rd, recomputed 2nd.
        if (self.where, self.calls) in (("forward", 11), ("recompute", 14)):
            self.action()
        x = self.linear(x)
        return CallingBackward.apply(x, self.action) if (self.where, self.calls) == ("backward", 14) else x


def raise_error() -> None:
    now()
    raise Broken("on purpose")


def raise_many_lines() -> None:
    now()
    raise Broken("on purpose,\nwhere a worker was")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_and(action: Callable[[], None], file: Path) -> None:
    file.write_text(str(time.monotonic()))
    action()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(60)


class Loss:
    """A mean that does damage at micro-batch 2 of the second step, which the last stage recomputes 2nd."""

    def __init__(self, action: Callable[[], None] | None) -> None:
        self.action = action
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.action is not None and self.calls == 6:
            self.action()
        return (outputs - targets).square().mean()


def train(
    rank: int,
    num_stages: int,
    culprit: int,
    where: str,
    action: Callable[[], None] = raise_error,
    timeout_seconds: float = 30.0,
    num_replicas: int = 1,
    slow: float = 0.0,
    stages_per_device: int = 1,
) -> Event | None:
    """Train three steps, in the second of which the process with rank `culprit` meets its fate."""
    global raised_at
    raised_at = None
    num_devices = num_stages // stages_per_device
    mesh = init_device_mesh("cpu", (num_replicas, num_devices), mesh_dim_names=("replica", "stage"))
    is_culprit = rank == culprit
    layers = nn.Sequential(*(Layer(where if is_culprit else "", action) for _ in range(num_stages)))
    if slow and rank % num_stages == 0:
        layers[0] = nn.Sequential(Sleep(slow), layers[0])
    loss = Loss(action if is_culprit and where == "loss" else None)
    pipeline = gpipe.Pipeline(
        layers, loss, [1] * num_stages, 4, mesh=mesh, timeout_seconds=timeout_seconds,
        schedule="gpipe" if stages_per_device == 1 else "interleaved_1f1b", stages_per_device=stages_per_device,
    )  # fmt: skip
    try:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
        if is_culprit and where == "data":
            try:
                action()
            except Broken as error:
                pipeline.job.abort(error)
                raise
        # Behind the culprit, a stage may have finished the second step when it fails in its backward.
        for _ in range(2):
            pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    except Exception as error:  # noqa: BLE001 - it is what the tests look at
        return _event(pipeline, error)
    return None


def train_apart(*args: Any) -> Event | None:
    """Train likewise, as if each process had a host of its own: messages go over Gloo, and not over sockets."""
    with host_of_its_own():
        return train(*args)


WIRES = pytest.mark.parametrize("run", [train, train_apart], ids=["one host", "hosts"])


def _event(pipeline: gpipe.Pipeline, error: Exception) -> Event:
    end = time.monotonic()
    again = ""
    try:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    except gpipe.PipelineError as refusal:
        again = str(refusal)
    place = (getattr(error, name, None) for name in ("stage", "micro_batch", "layer"))
    return Event(type(error).__name__, str(error), *place, end, raised_at, again, isinstance(error, Broken))


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


# Errors. The processes survive them, so that one set of processes can serve many tests; but not those of other files.


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(4)
    yield pool
    pool.close()


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


# Losses. The processes do not survive them.


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
        return _event(pipeline, error)
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


def disagree(rank: int) -> str:
    """Evaluate in the first stage's process while the others train."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    pipeline = gpipe.Pipeline(
        nn.Sequential(Layer(), Layer(), Layer()), Loss(None), [1, 1, 1], 2, mesh=mesh, timeout_seconds=1.0
    )
    try:
        if rank == 0:
            pipeline.job.gather(1)
        else:
            pipeline.train_step((None, torch.ones(8, 4)))
    except gpipe.PipelineError as error:
        return str(error)
    return ""


def test_processes_that_make_different_calls_are_told_so(pool: ProcessPool) -> None:
    for text in pool.run(3, disagree):
        assert "wait for each other; every process must make the same calls to the pipeline" in text


def give_other_arguments(rank: int, what: str) -> tuple[str, str]:
    """Give one process something else than the other; return the error, and that of the next step."""
    are_replicas = what == "frozen" or what.endswith("of a replica")
    mesh = init_device_mesh("cpu", (2, 1) if are_replicas else (1, 2), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with host_of_its_own() if what.endswith("apart") else nullcontext():
        pipeline = gpipe.Pipeline(
            layers, Loss(None), [2] if are_replicas else [1, 1], 2, mesh=mesh, timeout_seconds=10.0
        )
    batch, errors = (torch.ones(8, 4), torch.ones(8, 4)), []
    scaler = None
    if what != "scaler":
        scaler = gpipe.GradientScaler(2.0**4 if what.startswith("scale") and rank == 1 else 2.0**3)
    if what == "scaler" and rank == 1:
        scaler = gpipe.GradientScaler()
    if what.startswith("step"):
        pipeline.step = rank
    if what == "frozen":
        layers[rank].requires_grad_(False)
    for number in range(3):
        try:
            if what.startswith("evaluation") and rank == number == 0:
                pipeline.evaluate(batch[0])
            else:
                pipeline.train_step(
                    batch, scaler=scaler, max_gradient_norm=1.0 if what.startswith("norm") and rank == 0 else None
                )
        except (ValueError, gpipe.PipelineError) as error:
            errors.append(str(error))
    return errors[0], errors[-1]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("scaler", r"scaler\.scale is None in process 0 of the pipeline and 65536\.0 in process 1 of the pipeline;"),
        ("scale", r"scaler\.scale is 8\.0 in process 0 of the pipeline and 16\.0 in process 1 of the pipeline;"),
        ("norm", r"max_gradient_norm is 1\.0 in process 0 of the pipeline and None in process 1 of the pipeline;"),
        ("step", r"step is 0 in process 0 of the pipeline and 1 in process 1 of the pipeline; give every"),
        ("frozen", r"layers\.0\.weight is frozen in one replica and not in another; freeze the same"),
        ("evaluation", r"every process must make the same calls to the pipeline, in the same order"),
        ("evaluation, apart", r"every process must make the same calls to the pipeline, in the same order"),
        ("norm of a replica", r"max_gradient_norm is 1\.0 in replica 0 and None in replica 1; give every process the"),
        ("step of a replica", r"step is 0 in replica 0 and 1 in replica 1; give every process the same"),
        ("scale of a replica", r"scaler\.scale is 8\.0 in replica 0 and 16\.0 in replica 1; give every process the"),
    ],
)
def test_processes_that_are_given_different_things_are_told_so(what: str, said: str, pool: ProcessPool) -> None:
    for first, second in pool.run(2, give_other_arguments, what):
        assert re.search(said, first), first
        assert second.startswith("this pipeline has stopped"), second


def use_when_closed(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1], 2, mesh=mesh, timeout_seconds=10.0)
    pipeline.close()
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    return str(error.value)


def test_a_pipeline_that_was_closed_says_so(pool: ProcessPool) -> None:
    said = "this pipeline has stopped and cannot continue; build a new one. The cause: it was closed"
    assert pool.run(2, use_when_closed) == [said, said]


def stop_early(rank: int) -> str:
    """Close the pipeline in one process, or let go of it, and take a step in the other."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1], 2, mesh=mesh, timeout_seconds=10.0)
    batch = torch.ones(8, 4), torch.ones(8, 4)
    pipeline.train_step(batch)
    if rank == 0:
        pipeline.close()
        return ""
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step(batch)
    return str(error.value)


def test_a_process_that_closes_its_pipeline_is_not_taken_for_killed(pool: ProcessPool) -> None:
    _, said = pool.run(2, stop_early)
    assert re.search(
        r"^stage 0 \(rank 0, .*\) has closed its pipeline; every process must make the same calls to it", said
    )
