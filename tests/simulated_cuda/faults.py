"""GPUs and links that stop in the middle of a training, and what each process says."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.writer import Snapshot, Writer
from gpipe.pipeline.job.mesh_job import MeshJob
from gpipe.pipeline.shared.averaging import _Bucket
from gpipe.pipeline.shared.peers import Peers
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.pipeline.wire.streams import Sender
from gpipe.training.tracking import Tracker
from tests.simulated_cuda import nccl, streams
from tests.support.calling_backward import CallingBackward
from tests.training.small_run import small_trainer


class Ending(NamedTuple):
    """The error with which a process ended."""

    text: str
    stage: int | None
    seconds: float  # since the damage was done, anywhere


class Layer(nn.Module):
    """A linear layer that can do damage once, before it computes, or before its gradient is computed."""

    def __init__(self, *, has_norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if has_norm else nn.Identity()
        self.where = ""
        self.action: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == ("forward" if self.training else "evaluation"):
            self._strike()
        x = self.norm(self.linear(x))
        return CallingBackward.apply(x, self._strike) if self.where == "backward" else x

    def _strike(self) -> None:
        self.action()
        self.action = lambda: None


class Trial(NamedTuple):
    """What is trained, and what happens to one process of it.

    Attributes:
        culprit: the rank of that process.
        fault: see `_damage`.
        where: "forward", "backward" or "evaluation" of its layer, or a key of `STEPS`.
        model: "plain"; "tied", whose first and last layers share a weight; or "norms", which are synchronised.
        shares: what the replicas share out: "nothing", the "state" of the optimizer, or the "weights".
    """

    num_stages: int
    culprit: int
    fault: str
    where: str
    timeout_seconds: float
    num_replicas: int = 1
    model: str = "plain"
    shares: str = "nothing"


STEPS: dict[str, tuple[type, str]] = {
    "averaging": (_Bucket, "reduce"),
    "sum of tied gradients": (Peers, "broadcast"),
    "update": (ShardedOptimizer, "_exchange_parameters"),
}
"""Where else damage is done: right before a method of a class."""


def train(rank: int, *given: Any) -> Ending | None:
    """Train and evaluate; after that, in the next step or evaluation, the culprit of a `Trial` meets its fate."""
    nccl.patience_seconds = 0.2
    trial = Trial(*given)
    shape, mesh = (trial.num_replicas, trial.num_stages), None
    if math.prod(shape) > 1:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(*(Layer(has_norm=trial.model == "norms") for _ in range(trial.num_stages)))
    if trial.model == "tied":
        layers[-1].linear.weight = layers[0].linear.weight
    device = torch.device("cuda", rank)
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(layers), nn.functional.mse_loss, [1] * trial.num_stages, 4, mesh=mesh, devices=device,
        timeout_seconds=trial.timeout_seconds, synchronize_batch_norm=trial.model == "norms",
        shard_replicas=trial.shares == "weights",
    )  # fmt: skip
    optimizer: torch.optim.Optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=0.1)
    if trial.shares == "state":
        optimizer = ShardedOptimizer(optimizer, pipeline.job)
    batch = torch.randn(8, 4), torch.ones(8, 4)

    def train_step() -> None:
        pipeline.train_step(batch)
        optimizer.step()

    train_step()
    pipeline.evaluate(batch[0])
    if mesh is not None:
        dist.barrier()
    if rank == trial.culprit:
        action = functools.partial(_damage, trial.fault, device)
        if trial.where in STEPS:
            _act_before(*STEPS[trial.where], action)
        else:
            layer = layers[rank % trial.num_stages]
            layer.where, layer.action = trial.where, action
    begin = time.monotonic()
    try:
        if trial.where != "evaluation":
            train_step()
        pipeline.evaluate(batch[0])
        train_step()
    except Exception as error:  # noqa: BLE001 - it is what the tests look at
        return Ending(str(error), getattr(error, "stage", None), time.monotonic() - begin)
    return None


def _act_before(owner: type, name: str, action: Callable[[], Any]) -> None:
    """Call a function once, before the next call of a method."""
    method = getattr(owner, name)

    def act(*args: Any) -> Any:
        setattr(owner, name, method)
        action()
        return method(*args)

    setattr(owner, name, act)


def _damage(fault: str, device: torch.device) -> None:
    if fault == "a kernel hangs":
        streams.hang(device)
    elif fault == "a kernel fails":
        streams.break_device(device)
    elif fault == "a link is cut":
        nccl.cut_operations.add("ncclGroup")
    elif fault == "the link to the other replica is cut":
        nccl.cut_operations.add("ncclAllReduce")
    elif fault == "a peer stops at once":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:  # the host has announced the data, and never sends them
        Sender._send_on_device = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]


def name_link(rank: int) -> dict[str, Any]:
    """Return whether a process names the link that is cut."""
    ending = train(rank, *Trial(2, 0, "a link is cut", "forward", 2.0))
    return {"names the link": ending is not None and "see the link between" in ending.text}


def name_place(rank: int) -> dict[str, Any]:
    """Return whether a process names the task in which its GPU hangs."""
    ending = train(rank, *Trial(1, 0, "a kernel hangs", "backward", 1.0))
    return {"names the place": ending is not None and "stage 0, micro-batch 3, backward" in ending.text}


def name_exchange(rank: int) -> dict[str, Any]:
    """Return whether a replica names the link that is cut between it and the other one."""
    ending = train(rank, *Trial(1, 0, "the link to the other replica is cut", "averaging", 2.0, num_replicas=2))
    return {"names the links": ending is not None and "see the links between" in ending.text}


def save(rank: int, timeout_seconds: float) -> Ending:
    """Save beside a training, on a stream that hangs."""
    device = torch.device("cuda", 0)
    pipeline = gpipe.Pipeline(
        nn.Sequential(Layer()), nn.functional.mse_loss, [1], devices=device, timeout_seconds=timeout_seconds
    )
    snapshot = Snapshot([1])
    snapshot.take({"weights": dict(pipeline.named_parameters())})
    with torch.cuda.stream(snapshot._streams[device]):
        streams.hang(device)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(snapshot, Path(folder), pipeline, None, 1)
        try:
            writer.wait_until_copied()
        except CheckpointError as error:
            return Ending(str(error), None, time.monotonic() - begin)
    raise AssertionError("the tensors were copied")


def train_and_save(rank: int, culprit: int, fault: str, timeout_seconds: float, folder: Path) -> Ending | None:
    """Train in three processes and save each step; the process `culprit` meets its fate in its second save."""
    nccl.patience_seconds = 0.2
    device = torch.device("cuda", rank)
    trainer = small_trainer(
        folder, (2, 2, 2), mesh=init_device_mesh("cpu", (1, 3), mesh_dim_names=("replica", "stage")), devices=device,
        timeout_seconds=timeout_seconds, save_every_steps=1, evaluation_loaders={}, num_epochs=100,
        tracker=Tracker(folder, enabled=False),
    )  # fmt: skip
    copy, saves, damaged = Snapshot.copy, itertools.count(), folder / "damaged"

    def copy_with_damage(self: Snapshot) -> None:
        if next(saves) == 1:
            damaged.write_text(str(time.monotonic()))  # the clock of all processes
            with torch.cuda.stream(self._streams[device]):
                _damage("a peer stops at once" if fault == "a peer stops" else fault, device)
        copy(self)

    if rank == culprit:
        Snapshot.copy = copy_with_damage  # type: ignore[method-assign]
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001 - it is what the tests look at
        end = time.monotonic()
        text = "\n".join([*getattr(error, "__notes__", []), str(error)])  # the place is a note where it is new
        return Ending(text, getattr(error, "stage", None), end - float(damaged.read_text()))
    return None


def connect(rank: int, timeout_seconds: float) -> Ending | None:
    """Make a pipeline whose second process stops while NCCL's communicators are made."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    if rank == 1:
        MeshJob._connect_stages = lambda _: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign,assignment,return-value]
    begin = time.monotonic()
    try:
        gpipe.Pipeline(
            nn.Sequential(Layer(), Layer()), nn.functional.mse_loss, [1, 1], mesh=mesh,
            devices=torch.device("cuda", rank), timeout_seconds=timeout_seconds,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return Ending(str(error), getattr(error, "stage", None), time.monotonic() - begin)
    return None


def find_timeouts_of_links(rank: int) -> list[float]:
    """Return after how many seconds NCCL itself ends a transfer of a pipeline whose own time-out is 7 s."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(Layer(), Layer())
    pipeline = gpipe.Pipeline(
        layers, nn.functional.mse_loss, [1, 1], mesh=mesh, devices=torch.device("cuda", rank), timeout_seconds=7
    )
    ends = [*pipeline.job.transfer._senders.values(), *pipeline.job.transfer._receivers.values()]
    found = [end.link.nccl.timeout.total_seconds() for end in ends]
    pipeline.close()
    return found


def find_timeouts(rank: int, timeout_seconds: float, compiles: bool) -> dict[str, list[float]]:
    """Return after how many seconds NCCL itself ends each kind of operation, in two replicas of a tied pipeline."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(Layer(has_norm=True), Layer(has_norm=True))
    layers[1].linear.weight = layers[0].linear.weight
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(layers), nn.functional.mse_loss, [1, 1], 2, mesh=mesh,
        devices=torch.device("cuda", rank), timeout_seconds=timeout_seconds, synchronize_batch_norm=True,
    )  # fmt: skip
    optimizer = ShardedOptimizer(torch.optim.SGD(pipeline.named_parameters(), lr=0.1), pipeline.job)
    if compiles:
        pipeline.compile(disable=True)
    nccl.timeouts_seconds.clear()
    pipeline.train_step((torch.randn(8, 4), torch.ones(8, 4)))
    optimizer.step()
    pipeline.close()
    return {name: sorted(found) for name, found in nccl.timeouts_seconds.items()}
