"""Weights that replicas share out train as those that each of them has in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import gpipe
from gpipe.checkpoint.content import Content
from gpipe.checkpoint.manifest import Position
from gpipe.checkpoint.saver import Saver
from gpipe.pipeline.schedules.choice import SPLIT_SCHEDULES
from tests.support.gate import Gate
from tests.support.process_pool import ProcessPool

Weights = dict[str, np.ndarray]
MODES = ("always", "except_last", "never")
LAYOUTS = (
    (1, (5,), "gpipe"),
    (2, (2, 3), "1f1b"),
    (2, (1, 1, 1, 2), "interleaved_1f1b"),
)


def make_layers(seed: int = 0, *, depends: bool = True) -> nn.Sequential:
    """Return layers of odd sizes.

    depends: whether what they do depends on micro-batches, by a batch norm and dropout.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        depending = (nn.BatchNorm1d(6), nn.Dropout(0.3)) if depends else ()
        middle = nn.Sequential(nn.Linear(7, 6), *depending)
        layers = nn.Sequential(nn.Linear(6, 6), Gate(), nn.Sequential(nn.Linear(6, 7), nn.Tanh()), middle)
        with torch.no_grad():  # the gate sees the first feature as it is
            layers[0].weight[0], layers[0].bias[0] = torch.eye(6)[0], 0.0
        return gpipe.convert_batch_norm(layers.append(nn.Linear(6, 5)).double())


@dataclass(frozen=True)
class Case:
    mode: str
    sizes: tuple[int, ...] = (8, 8)
    gated: tuple[int, ...] = ()
    num_steps: int = 2
    max_norm: float | None = None
    same_weights: bool = True
    depends: bool = True


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    held: int = 0  # numbers in the parameters here
    evaluated: float = 0.0


def whole(tensor: Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def train(
    rank: int, num_devices: int, partitions: tuple[int, ...], schedule: str, cases: list[Case]
) -> list[tuple[Outcome, Outcome]]:
    mesh = init_device_mesh("cpu", (len(cases[0].sizes), num_devices), mesh_dim_names=("replica", "stage"))

    def run(case: Case, *, shards: bool) -> Outcome:
        layers = make_layers(0 if case.same_weights else rank, depends=case.depends)
        pipeline = gpipe.Pipeline(
            layers, nn.functional.cross_entropy, partitions, 4,
            rematerialize=case.mode, schedule=schedule, stages_per_device=len(partitions) // num_devices, mesh=mesh,
            timeout_seconds=30, shard_replicas=shards,
        )  # fmt: skip
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
        found = Outcome(held=sum((p.to_local() if shards else p).numel() for p in pipeline.parameters()))
        for step in range(case.num_steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(sum(case.sizes), 6, generator=generator, dtype=torch.float64)
            inputs[list(case.gated), 0] = 11.0
            targets = torch.randint(5, (sum(case.sizes),), generator=generator)
            inputs, targets = (part.split(case.sizes)[pipeline.job.replica_index] for part in (inputs, targets))
            batch = (inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
            found.losses.append(pipeline.train_step(batch).loss)
            if case.max_norm is not None:
                found.norms.append(pipeline.clip_gradients(case.max_norm))
            named = ((name, p.grad) for name, p in pipeline.named_parameters())
            found.gradients.append({name: whole(g) for name, g in named if g is not None})
            optimizer.step()
            optimizer.zero_grad()
        found.evaluated = pipeline.evaluate(*batch)["loss"]
        found.weights = {name: whole(value) for name, value in pipeline.layers.state_dict().items()}
        pipeline.close()
        return found

    return [(run(case, shards=False), run(case, shards=True)) for case in cases]


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[2]}-{layout[1]}")
def layout(request: pytest.FixtureRequest) -> tuple[int, tuple[int, ...], str]:
    layout: tuple[int, tuple[int, ...], str] = request.param
    return layout


def run_all(
    processes: ProcessPool, layout: tuple[int, tuple[int, ...], str], cases: list[Case]
) -> list[tuple[Case, Outcome, Outcome]]:
    answers = processes.run(len(cases[0].sizes) * layout[0], train, *layout, cases)
    return [(case, *pair) for answer in answers for case, pair in zip(cases, answer, strict=True)]


def pair_modes(layout: tuple[int, tuple[int, ...], str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return each mode with one of three values: three layouts together have all pairs."""
    turn = LAYOUTS.index(layout)
    return [(mode, values[(turn + place) % len(values)]) for place, mode in enumerate(MODES)]


# Two numbers have one sum, and a half is exact: with two replicas no order of adding up is left.
def test_two_replicas_that_share_out_hold_their_parts_and_have_the_bits_of_two_with_all_weights(
    layout: tuple[int, tuple[int, ...], str], processes: ProcessPool
) -> None:
    cases = [Case(mode, gated=gated) for mode, gated in pair_modes(layout, ((0, 8), (7, 15), (2, 9, 12)))]
    for case, full, shared in run_all(processes, layout, cases):
        assert shared.losses == full.losses and shared.evaluated == full.evaluated, case
        assert shared.held <= 0.6 * full.held
        for ours, theirs in zip(shared.gradients, full.gradients, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours), case
        assert shared.weights.keys() == full.weights.keys()
        assert all(np.array_equal(shared.weights[name], full.weights[name]) for name in full.weights), case


def train_alone(case: Case) -> list[dict[str, np.ndarray]]:
    """Return the gradients of each replica's mini-batch by itself, in the first step."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(case.sizes), 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (sum(case.sizes),), generator=generator)
    found = []
    for replica, batch in enumerate(zip(inputs.split(case.sizes), targets.split(case.sizes), strict=True)):
        pipeline = gpipe.Pipeline(make_layers(), nn.functional.cross_entropy, [5], 4)
        pipeline.stages[0].first_micro_batch = 4 * replica
        pipeline.train_step(batch)
        found.append({name: p.grad.numpy() for name, p in pipeline.named_parameters() if p.grad is not None})
    return found


# R - 1 sums and a division, each rounded once, in whatever order: 2 R roundings between any two ways.
@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "num_devices"), [(3, 1), (4, 1), (3, 2)])
def test_the_sums_of_more_replicas_differ_by_rounding_alone(
    num_replicas: int, num_devices: int, processes: ProcessPool
) -> None:
    layouts = [layout for layout in LAYOUTS if layout[0] == num_devices and layout[2] != "1f1b"]
    cases = [Case(mode, sizes=(8,) * num_replicas) for mode in ("always", "never")]
    alone = train_alone(cases[0])
    roundings = 2 * num_replicas * np.finfo(np.float64).eps
    for layout in layouts:
        for case, full, shared in run_all(processes, layout, cases):
            assert shared.losses[0] == full.losses[0]
            assert shared.losses == pytest.approx(full.losses, rel=1e-12)
            assert shared.held < full.held / num_replicas + 60, "rows are not cut: an uneven share has one more"
            for name, gradient in full.gradients[0].items():
                bound = roundings * np.mean([np.abs(one[name]) for one in alone], axis=0)
                assert (np.abs(shared.gradients[0][name] - gradient) <= bound).all(), (case, name)
                mean = np.mean([one[name] for one in alone], axis=0)
                assert (np.abs(shared.gradients[0][name] - mean) <= bound).all(), (case, name)


def test_a_parameter_that_a_replica_does_not_use_gets_the_others_half(
    layout: tuple[int, tuple[int, ...], str], processes: ProcessPool
) -> None:
    cases = [Case(mode, gated=gated) for mode, gated in pair_modes(layout, ((7,), (8,), ()))]
    for case, full, shared in run_all(processes, layout, cases):
        for ours, theirs in zip(shared.gradients, full.gradients, strict=True):
            for name, gradient in ours.items():
                assert np.array_equal(gradient, theirs.get(name, np.zeros_like(gradient))), (case, name)


def test_replicas_with_fewer_examples_and_micro_batches_weigh_less(
    layout: tuple[int, tuple[int, ...], str], processes: ProcessPool
) -> None:
    # A replica of 3 examples makes 3 micro-batches, and so does the other: sums of other parts.
    pairs = pair_modes(layout, ((9, 6), (8, 3), (3, 8)))
    cases = [Case(mode, sizes=sizes, depends=False) for mode, sizes in pairs]
    for case, full, shared in run_all(processes, layout, cases):
        assert shared.losses == pytest.approx(full.losses, rel=1e-12), case


def test_the_norm_is_that_of_whole_gradients(layout: tuple[int, tuple[int, ...], str], processes: ProcessPool) -> None:
    # The squares of a gradient's two parts are added up apart: 1e-12.
    for _, full, shared in run_all(processes, layout, [Case("always", max_norm=0.05)]):
        assert shared.norms == pytest.approx(full.norms, rel=1e-12)
        for name, value in full.weights.items():
            np.testing.assert_allclose(shared.weights[name], value, rtol=0, atol=1e-9)


def test_all_begin_with_the_weights_of_replica_0(processes: ProcessPool) -> None:
    for _, full, shared in run_all(processes, (1, (5,), "gpipe"), [Case("never", same_weights=False)]):
        assert all(np.array_equal(shared.weights[name], full.weights[name]) for name in full.weights)


def train_with_padding(rank: int) -> list[dict[str, np.ndarray]]:
    """Return the gradients with whole and with shared weights, where a micro-batch of replica 1 is padding alone."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    found = []
    for shards in (False, True):
        pipeline = gpipe.Pipeline(
            make_layers(), partial(nn.functional.cross_entropy, ignore_index=-1), [2, 3], 2, stages_per_device=2,
            schedule="interleaved_1f1b", mesh=mesh, timeout_seconds=10, shard_replicas=shards,
            loss_weight=lambda targets: int((targets >= 0).sum()),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, (8,), generator=generator)
        targets[: 4 * rank] = -1
        pipeline.train_step((inputs, targets))
        found.append({name: whole(p.grad) for name, p in pipeline.named_parameters() if p.grad is not None})
        pipeline.close()
    return found


def test_a_micro_batch_of_padding_alone_has_the_bits_of_whole_weights(processes: ProcessPool) -> None:
    for full, shared in processes.run(2, train_with_padding):
        assert full.keys() == shared.keys() - {"layers.1.weight"}  # of the gate that no example opens
        assert all(np.array_equal(shared[name], full[name]) for name in full)


class Viewing(nn.Module):
    """Returns views of parameters, one of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.query = nn.Linear(6, 6), nn.Parameter(torch.linspace(-1, 1, 6))
        self.frozen = nn.Parameter(torch.linspace(0, 1, 6), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.linear.weight.T[0].expand(len(x), 6)
        return self.linear(x), self.query.expand(len(x), 6), weight, self.frozen.expand(len(x), 6)


class Multiplying(nn.Module):
    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(parts).prod(0)


def train_with_views(rank: int, mode: str) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Return the loss of an evaluation and the gradients with whole and with shared weights."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(Viewing(), Multiplying(), nn.Linear(6, 5)).double()
        pipeline = gpipe.Pipeline(
            layers, nn.functional.cross_entropy, [3], 2,
            rematerialize=mode, mesh=mesh, timeout_seconds=10, shard_replicas=shards,
        )  # fmt: skip
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        batch = inputs, torch.arange(4)
        pipeline.train_step(batch)
        gradients = {name: whole(p.grad) for name, p in pipeline.named_parameters() if p.grad is not None}
        found.append((pipeline.evaluate(*batch)["loss"], gradients))
        pipeline.close()
    return found


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_layer_may_return_views_of_its_parameters(mode: str, processes: ProcessPool) -> None:
    """Their memory is let go of after the layer's forward."""
    for full, shared in processes.run(2, train_with_views, mode):
        assert shared[0] == full[0] and shared[1].keys() == full[1].keys()
        assert all(np.array_equal(shared[1][name], full[1][name]) for name in full[1])


def train_with_a_gate_first(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(Gate(), nn.Linear(6, 5))
    loss = nn.functional.cross_entropy
    pipeline = gpipe.Pipeline(layers, loss, [2], 2, mesh=mesh, timeout_seconds=10, shard_replicas=True)
    inputs = torch.full((4, 6), 11.0 * rank)
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step((inputs, torch.zeros(4, dtype=torch.int64)))
    pipeline.close()
    return str(error.value)


def test_a_layer_whose_backward_one_replica_would_leave_out_is_refused(processes: ProcessPool) -> None:
    for said in processes.run(2, train_with_a_gate_first):
        assert "layer 0 (FSDPGate), forward: ValueError: no output of the layer needs a gradient" in said
        assert said.endswith("or set shard_replicas=False")


def train_behind_a_frozen_layer(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 5))
    pipeline = gpipe.Pipeline(
        layers, nn.functional.cross_entropy, [2], 2, mesh=mesh, timeout_seconds=10, shard_replicas=True
    )
    pipeline.train_step((torch.ones(4, 6), torch.arange(4)))
    pipeline.close()
    return [name for name, parameter in pipeline.named_parameters() if parameter.grad is not None]


def test_a_frozen_layer_needs_no_output_with_a_gradient(processes: ProcessPool) -> None:
    assert processes.run(2, train_behind_a_frozen_layer) == [["layers.1.weight", "layers.1.bias"]] * 2


def refuse(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))

    def make(layers: nn.Sequential, schedule: str = "gpipe") -> gpipe.Pipeline:
        partitions, per_device = ([2, 3], 2) if schedule == "zb_v" else ([len(layers)], 1)
        return gpipe.Pipeline(
            layers, nn.functional.cross_entropy, partitions, 2, mesh=mesh, schedule=schedule,
            stages_per_device=per_device, timeout_seconds=10, shard_replicas=True,
        )  # fmt: skip

    def said(run: Callable[..., Any], *args: Any) -> str:
        with pytest.raises(ValueError) as error:  # noqa: PT011  (the test looks at the words)
            run(*args)
        return str(error.value)

    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(4, 4))
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].weight.register_hook(lambda gradient: gradient * 2)
    sharded = nn.Sequential(nn.Linear(4, 4))
    torch.distributed.fsdp.fully_shard(sharded[0], mesh=mesh["replica"])
    pipeline = make(nn.Sequential(nn.Linear(4, 4)))
    return {name: said(make, make_layers(), name) for name in sorted(SPLIT_SCHEDULES)} | {
        "tied": said(make, tied),
        "meta": said(make, meta),
        "hooked": said(make, hooked),
        "sharded": said(make, sharded),
        "compile": said(pipeline.compile),
        "save": said(Saver(Path("nowhere"), pipeline).rehearse, Content(Position(0, 0, 0, 0), {})),
        "late": said(add_a_parameter, pipeline),
    }


def add_a_parameter(pipeline: gpipe.Pipeline) -> None:
    batch = torch.randn(4, 4), torch.arange(4)
    pipeline.train_step(batch)
    pipeline.evaluate(batch[0])
    pipeline.train_step(batch)
    pipeline.layers["0"].extra = nn.Parameter(torch.ones(4))
    pipeline.train_step(batch)


def test_what_cannot_be_shared_out_is_refused_by_name(processes: ProcessPool) -> None:
    for said in processes.run(2, refuse):
        for name in SPLIT_SCHEDULES:
            assert said[name].startswith(f"schedule is {name} and shard_replicas is True")
            assert "such as gpipe or 1f1b, or set shard_replicas=False" in said[name]
        assert said["tied"].startswith("layers.0.weight is shared by several layers")
        assert said["meta"] == "layer 0 is on the meta device and shard_replicas is True; build the layers on the CPU"
        assert said["sharded"].startswith("layer 0 has parameters that fully_shard has sharded")
        assert said["hooked"].startswith("layers.0.weight has a hook and shard_replicas is True")
        assert said["late"].startswith("layers.0.extra was added after the pipeline was made, and shard_replicas is")
        assert "do not compile" in said["compile"]
        assert "save the parts with torch.distributed.checkpoint" in said["save"]


def save_and_go_on(rank: int, layout: tuple[int, tuple[int, ...], str], folder: str) -> tuple[Weights, Weights]:
    """Return the weights after four steps, and after two more steps from what was saved after two."""
    num_devices, partitions, schedule = layout
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // num_devices, num_devices), mesh_dim_names=("replica", "stage")
    )
    per_device = len(partitions) // num_devices

    def make(seed: int) -> tuple[gpipe.Pipeline, torch.optim.Optimizer]:
        pipeline = gpipe.Pipeline(
            make_layers(seed), nn.functional.cross_entropy, partitions, 4, schedule=schedule,
            stages_per_device=per_device, mesh=mesh, timeout_seconds=30, shard_replicas=True,
        )  # fmt: skip
        return pipeline, torch.optim.Adam(pipeline.parameters(), lr=0.01)

    def step(pipeline: gpipe.Pipeline, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(10 * pipeline.step + pipeline.job.replica_index)
        inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        pipeline.train_step((inputs, torch.randint(5, (8,), generator=generator)))
        optimizer.step()
        optimizer.zero_grad()

    def read(pipeline: gpipe.Pipeline) -> Weights:
        pipeline.close()
        # This replica's parts: torch remembers meshes by what equals them, and may know one of an earlier test.
        found = pipeline.layers.state_dict().items()
        return {name: (t.to_local() if isinstance(t, DTensor) else t).numpy().copy() for name, t in found}

    pipeline, optimizer = make(0)
    for _ in range(2):
        step(pipeline, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter: stages have other groups
    model, state = get_state_dict(pipeline.layers, optimizer, options=flat)
    checkpoint.save({"model": model, "optimizer": state, "step": pipeline.step}, checkpoint_id=folder)
    for _ in range(2):
        step(pipeline, optimizer)
    unbroken = read(pipeline)

    pipeline, optimizer = make(1)
    model, state = get_state_dict(pipeline.layers, optimizer, options=flat)
    loaded = {"model": model, "optimizer": state, "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(pipeline.layers, optimizer, model_state_dict=model, optim_state_dict=state, options=flat)
    pipeline.step = loaded["step"]
    for _ in range(2):
        step(pipeline, optimizer)
    return unbroken, read(pipeline)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parts_that_torch_saved_go_on_as_if_nothing_had_been(
    layout: tuple[int, tuple[int, ...], str], num_replicas: int, processes: ProcessPool, tmp_path: Path
) -> None:
    for unbroken, resumed in processes.run(num_replicas * layout[0], save_and_go_on, layout, str(tmp_path)):
        assert unbroken.keys() == resumed.keys()
        assert all(np.array_equal(unbroken[name], resumed[name]) for name in unbroken)
