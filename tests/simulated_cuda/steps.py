"""Training steps on GPUs: what can be seen of them afterwards, as numbers of the host."""

from __future__ import annotations

import itertools
import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gpipe
from gpipe.pipeline.schedule import Rematerialize, StepSchedule
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.pipeline.step_end.gradient_norm import local_part
from gpipe.training.checkpoints import wrap_optimizer
from tests.simulated_cuda import ledger
from tests.support.random_layers import build

KINDS = (
    "conv", "norm", "branch", "dropout", "channels_last", "nest", "holes", "frozen", "drop_path", "norm", "join",
    "conv", "unused",
)  # fmt: skip
CUTS = {1: (14,), 2: (7, 7), 3: (3, 5, 6), 4: (1, 6, 5, 2), 6: (2, 2, 3, 2, 2, 3)}
STATE_WAITS = "operations waited for blindly for the optimizer's state"
SYNCHRONISATIONS, WAITS, BLIND = "host synchronisations", "waits of default streams", "operations waited for blindly"
PLACES, BLIND_EXCHANGES = "places of host synchronisations", "exchanges waited for blindly"
GRAPHS, THREADS = "graphs launched", "threads that ran layers"


@dataclass(frozen=True)
class Setting:
    """How the model of `KINDS` is trained.

    Attributes:
        device: "cuda", or "cpu" for what to compare with.
        tied: whether the first and the last convolution share their weights.
        first_on_cpu: whether a process that plays all stages has the first one on the CPU.
        idle_norm: whether replica 1 leaves out a batch norm.
        shards_optimizer: whether replicas share out the optimizer's state.
        shards_replicas: whether they share out the weights too.
        checks_recomputation: whether recomputations are compared with forwards.
        cuda_graphs: whether layers run as CUDA graphs.
        device_threads: whether each device has a launching thread; all then works on streams of its own.
    """

    num_stages: int = 1
    rematerialize: str = "never"
    schedule: str = "gpipe"
    stages_per_device: int = 1
    num_microbatches: int = 4
    device: str = "cuda"
    synchronize_batch_norm: bool = False
    tied: bool = False
    first_on_cpu: bool = False
    idle_norm: bool = False
    autocast: bool = False
    shards_optimizer: bool = False
    shards_replicas: bool = False
    checks_recomputation: bool = False
    cuda_graphs: bool = False
    device_threads: bool = False

    def one_stage(self) -> Setting:
        """Return the same training without a pipeline: interleaving has the order of 1F1B in each stage."""
        schedule = "gpipe" if self.schedule in ("gpipe", "split_gpipe") else "1f1b"
        return replace(
            self, num_stages=1, rematerialize="never", schedule=schedule, stages_per_device=1, cuda_graphs=False,
            device_threads=False,
        )  # fmt: skip


def train(rank: int, setting: Setting) -> dict[str, Any]:
    """Train two steps, clip, update, evaluate, and fail; return all numbers by name, and counts of the last step.

    The first step records its timeline, the last one's loss is not finite.
    """
    with ExitStack() as streams:
        for index in range(torch.cuda.device_count() if setting.device_threads else 0):
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(index)))
        return _train(rank, setting)


def _train(rank: int, setting: Setting) -> dict[str, Any]:
    num_devices = setting.num_stages // setting.stages_per_device
    world, mesh = dist.get_world_size() if dist.is_initialized() else 1, None
    if world > 1:
        mesh = init_device_mesh("cpu", (world // num_devices, num_devices), mesh_dim_names=("replica", "stage"))
    layers = build(KINDS)
    if setting.tied:
        layers[11].module.weight = layers[0].module.weight
    if setting.idle_norm and rank == 1:
        layers[9].module.forward = lambda x: x
    pipeline = _build_pipeline(layers, setting, world, mesh)
    threads = set[str]()
    for layer in pipeline.layers.values():
        layer.register_forward_pre_hook(lambda *_: threads.add(threading.current_thread().name))
    nothing = torch.zeros(1, requires_grad=True)  # torch's optimizers refuse a stage without parameters
    optimizer: torch.optim.Optimizer
    if setting.shards_optimizer:
        optimizer = torch.optim.SGD(pipeline.named_parameters(), lr=0.1, momentum=0.9)
        optimizer = ShardedOptimizer(optimizer, pipeline.job)
    else:
        optimizer = torch.optim.SGD([*pipeline.parameters(), nothing], lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(pipeline.job.replica_index)
    states = [one.get_state() for one in (torch.default_generator, *torch.cuda.default_generators)]
    found: dict[str, Any] = {}
    num_blind = num_blind_exchanges = 0
    for stage_device in pipeline.job.devices.values():
        torch.ones(1, device=stage_device)  # something that the first step finds unfinished
    for step in range(2):
        inputs, targets = torch.randn(7, 4, 6, 6, generator=generator), torch.randint(5, (7,), generator=generator)
        optimizer.zero_grad()
        num_blind += ledger.counts[BLIND]
        ledger.forget()
        with torch.autocast(setting.device, torch.bfloat16, enabled=setting.autocast):
            batch = inputs if pipeline.is_first else None, targets if pipeline.is_last else None
            report = pipeline.train_step(batch, record_timeline=step == 0)
        found |= {count: ledger.counts[count] for count in (SYNCHRONISATIONS, WAITS)}  # those of the last step stay
        found[PLACES] = dict(ledger.synchronisations)
        found[GRAPHS] = sum(number for what, number in ledger.counts.items() if what.startswith("graphs on"))
        num_blind_exchanges += ledger.counts[BLIND_EXCHANGES]
        found |= {f"loss {step}": report.loss, f"norm {step}": pipeline.clip_gradients(0.5)}
        optimizer.step()
        if report.timeline is not None:
            _check_timeline(report.timeline, setting)
    if setting.shards_optimizer:
        num_before = ledger.counts[BLIND]
        state = wrap_optimizer(optimizer).read()
        found[STATE_WAITS] = ledger.counts[BLIND] - num_before
        # Reading numbers of what is still on a GPU waits for as much as the host does not happen to know yet.
        found |= {f"state of {name}": _numbers(value) for name, value in state.items()}
    output = pipeline.evaluate(inputs if pipeline.is_first else None)
    found |= {f"gradient of {name}": _numbers(one.grad) for name, one in pipeline.named_parameters()}
    found |= {f"layers.{name}": _numbers(value) for name, value in pipeline.layers.state_dict().items()}
    found |= {} if output is None else {"evaluation": _numbers(output)}
    try:
        pipeline.train_step((inputs * math.nan, targets))
    except gpipe.NonFiniteError:
        found["the first that is not finite"] = str(pipeline.first_non_finite((inputs * math.nan, targets)))
    found[BLIND_EXCHANGES] = num_blind_exchanges
    if world == 1:  # with several, it depends on who comes first
        found[BLIND] = num_blind + ledger.counts[BLIND]
    after = [one.get_state() for one in (torch.default_generator, *torch.cuda.default_generators)]
    assert all(map(torch.equal, states, after)), "the user's generators were disturbed"
    found[THREADS] = len(threads)
    pipeline.close()
    return found


def _build_pipeline(layers: nn.Sequential, setting: Setting, world: int, mesh: DeviceMesh | None) -> gpipe.Pipeline:
    pipeline = gpipe.Pipeline(
        layers, nn.functional.cross_entropy, CUTS[setting.num_stages], setting.num_microbatches,
        rematerialize=setting.rematerialize, schedule=setting.schedule, stages_per_device=setting.stages_per_device,
        devices=_choose_devices(setting, world), mesh=mesh, seed=3, timeout_seconds=10,
        synchronize_batch_norm=setting.synchronize_batch_norm, check_recomputation=setting.checks_recomputation,
        shard_replicas=setting.shards_replicas,
    )  # fmt: skip
    if setting.cuda_graphs:
        pipeline.use_cuda_graphs()
    if setting.device_threads:
        pipeline.use_device_threads()
    return pipeline


def count_transfers(rank: int, kinds: tuple[str, ...], num_microbatches: int) -> int:
    """Return how many operations of NCCL a step takes in one of two processes, whose boundary is after these layers."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(
        build(kinds), nn.functional.cross_entropy, [len(kinds), 1], num_microbatches, mesh=mesh,
        devices=f"cuda:{torch.cuda.current_device()}", timeout_seconds=10,
    )  # fmt: skip
    inputs, targets = torch.randn(8, 4, 6, 6), torch.zeros(8, dtype=torch.int64)
    pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
    pipeline.close()  # and wait until all has been sent
    return ledger.counts["NCCL operations"]


def train_with_metric(rank: int) -> dict[str, float]:
    """Return the metrics of a loss that makes them on the CPU."""

    def loss(outputs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return outputs.square().mean(), {"size": torch.tensor(2.0)}

    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(4, 5)), loss, [1], 2, devices="cuda")
    return pipeline.train_step((torch.ones(4, 4), torch.ones(4))).metrics


def train_with_class_weights(rank: int, device: str, *, on_host: bool = True) -> float:
    """Return the loss of a step with class weights on a device, and targets there or on the host."""
    layers = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        layers[0].weight.copy_(torch.arange(12.0).view(3, 4) / 8)
        layers[0].bias.zero_()
    loss = nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 4.0], device=device))
    targets = torch.tensor([0, 0, 1, 2], device="cpu" if on_host else device)
    pipeline = gpipe.Pipeline(layers.to(device), loss, [1], 2)
    return pipeline.train_step((torch.eye(4), targets)).loss


class _Pass(nn.Linear):
    """Hands on its input and its weight."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.weight


class _Multiply(nn.Module):
    """Multiplies two matrices."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] @ both[1]


def evaluate_and_overwrite(rank: int) -> list[float]:
    """Return all outputs of evaluations in which a process hands on what is overwritten right after them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(
        nn.Sequential(_Pass(4, 4), _Multiply()), nn.functional.mse_loss, [1, 1], 2, mesh=mesh,
        devices=f"cuda:{torch.cuda.current_device()}", timeout_seconds=10,
    )  # fmt: skip
    inputs, targets, found = torch.ones(2, 4, device="cuda"), torch.zeros(2), list[float]()
    handed_on = [inputs, *(parameter.data for parameter in pipeline.parameters())]
    for evaluate in (
        lambda: pipeline.evaluate(inputs),
        lambda: pipeline.measure(inputs, targets, lambda outputs, _: outputs[0]),
    ):
        for tensor in handed_on:
            tensor.fill_(1)
        rows = evaluate()
        for tensor in handed_on:
            tensor.fill_(2)
        found += [] if rows is None else torch.cat(list(rows)).tolist()
    pipeline.close()
    return found


def train_each(rank: int, settings: list[Setting]) -> list[dict[str, Any]]:
    """Train in several settings, one after the other, by the same processes."""
    return [train(rank, setting) for setting in settings]


def _choose_devices(setting: Setting, world: int) -> Any:
    if setting.device == "cpu":
        return "cpu"
    if world > 1:
        return f"cuda:{torch.cuda.current_device()}"
    row_of = {task.stage: row for row, tasks in enumerate(_make_schedule(setting)) for task in tasks}
    devices = [f"cuda:{row_of[stage] % torch.cuda.device_count()}" for stage in range(setting.num_stages)]
    return ["cpu", *devices[1:]] if setting.first_on_cpu else devices


def _make_schedule(setting: Setting) -> StepSchedule:
    mode = Rematerialize(setting.rematerialize)
    return SCHEDULES[setting.schedule](setting.num_stages, setting.num_microbatches, mode, setting.stages_per_device)


def _check_timeline(timeline: gpipe.Timeline, setting: Setting) -> None:
    """Check that each device ran its tasks one after the other, in the order of the schedule."""
    for row, tasks in enumerate(_make_schedule(setting)):
        events = sorted((e for e in timeline.events if timeline.row(e.task) == row), key=lambda event: event.start)
        assert [event.task for event in events] == tasks
        assert all(before.end <= after.start for before, after in itertools.pairwise(events))


def _numbers(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else local_part(tensor).detach().cpu().contiguous().numpy().copy()


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Compare all that one process found; it knows only its own layers."""
    for name, value in found.items():
        if name not in (SYNCHRONISATIONS, PLACES, WAITS, BLIND, BLIND_EXCHANGES, STATE_WAITS, GRAPHS, THREADS):
            assert name in expected, f"{what}: {name} is new"
            assert np.array_equal(value, expected[name]), f"{what}: {name} differs"  # type: ignore[arg-type]
