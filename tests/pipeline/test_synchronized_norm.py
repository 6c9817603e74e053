"""Batch norms of replicas normalise as one process that has the micro-batches of all of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import library as operators
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

import gpipe
import gpipe._torchvision  # before timm
from gpipe.pipeline.batch_norm import microbatch_phase
from gpipe.pipeline.microbatch import microbatch_sizes
from tests.process_pool import ProcessPool
from tests.random_layers import build as random_layers

from timm.layers import BatchNormAct2d  # isort: skip

MODES = ("always", "except_last", "never")
PADDING = -100
NUM_REPLICAS = 2


class Branches(nn.Module):
    """Has norms in parallel branches, and one that both of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.right(x).sin()) + self.left(x * x) * self.shared(x + 1)


def build() -> nn.Sequential:
    """Return layers with all kinds of batch norms; those behind the pooling see one value per example."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 1),
            Branches(),
            BatchNormAct2d(4),
            nn.Sequential(nn.Conv2d(4, 6, 2), nn.BatchNorm2d(6, affine=False)),
            nn.Sequential(nn.Tanh(), nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6, track_running_stats=False)),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
            nn.BatchNorm1d(5),
            nn.Linear(5, 3),
        )
    return layers.double()


@dataclass(frozen=True)
class Layout:
    """Replicas of a pipeline of so many processes."""

    partitions: tuple[int, ...]
    schedule: str = "gpipe"
    stages_per_device: int = 1

    @property
    def num_devices(self) -> int:
        return len(self.partitions) // self.stages_per_device


@dataclass(frozen=True)
class Case:
    """What replicas train on.

    Attributes:
        sizes: examples of each replica.
        padding: the examples, counted over all replicas, that have no target.
        frozen: layers that are not trained.
    """

    sizes: tuple[int, ...] = (6, 6)
    num_microbatches: int = 3
    mode: str = "always"
    padding: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    layers: Callable[[], nn.Sequential] = build
    dtype: torch.dtype = torch.float64
    synchronized: bool = True

    def build(self) -> nn.Sequential:
        """Return the layers."""
        layers = self.layers().to(self.dtype)
        for index in self.frozen:
            layers[index].requires_grad_(False)
        return layers

    def batch(self, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return the examples of all replicas, in order."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(sum(self.sizes), 3, 3, 3, generator=generator, dtype=torch.float64) * 2 + 5
        targets = torch.randint(3, (sum(self.sizes),), generator=generator)
        targets[list(self.padding)] = PADDING
        return inputs.to(self.dtype), targets

    def micro_batches(self) -> list[list[Tensor]]:
        """Return, for each micro-batch, which examples each replica has of it."""
        num_microbatches = min(self.num_microbatches, *self.sizes)
        parts = [
            own.split(microbatch_sizes(len(own), num_microbatches))
            for own in torch.arange(sum(self.sizes)).split(self.sizes)
        ]
        return [list(rows) for rows in zip(*parts, strict=True)]


State = dict[str, np.ndarray]


def num_targets(targets: Tensor) -> float:
    return float((targets != PADDING).sum())


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=PADDING)


def pipeline_of(case: Case, layout: Layout, mesh: Any) -> gpipe.Pipeline:
    layers = gpipe.convert_batch_norm(case.build())
    assert isinstance(layers, nn.Sequential)
    return gpipe.Pipeline(
        layers, mean_loss, layout.partitions, case.num_microbatches, rematerialize=case.mode, mesh=mesh,
        schedule=layout.schedule, stages_per_device=layout.stages_per_device, loss_weight=num_targets,
        timeout_seconds=10, synchronize_batch_norm=case.synchronized,
    )  # fmt: skip


def mesh_of(layout: Layout, num_replicas: int = NUM_REPLICAS) -> Any:
    return init_device_mesh("cpu", (num_replicas, layout.num_devices), mesh_dim_names=("replica", "stage"))


def train(rank: int, layout: Layout, cases: list[Case]) -> list[State]:
    """Return what each case leaves on this process: gradients of the first step, buffers after two, and the outputs."""
    mesh = mesh_of(layout)
    return [_train(case, layout, mesh) for case in cases]


def _train(case: Case, layout: Layout, mesh: Any) -> State:
    pipeline = pipeline_of(case, layout, mesh)
    found: State = {}
    for step in range(2):
        inputs, targets = (part.split(case.sizes)[pipeline.replica_index] for part in case.batch(step))
        pipeline.train_step((inputs, targets))
        for name, parameter in pipeline.named_parameters():
            if step == 0 and parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.numpy().copy()
    found |= {f"layers.{name}": buffer.numpy() for name, buffer in pipeline.layers.named_buffers()}
    pipeline.close()
    return found


def plain(case: Case) -> State:
    """Train the plain model on each micro-batch of all replicas; then move the averages by all that each norm saw."""
    layers, found = case.build(), {}
    norms = {name: module for name, module in layers.named_modules() if isinstance(module, _BatchNorm)}
    averages = copy.deepcopy(norms)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].detach().clone()))
    for step in range(2):
        seen.clear()
        inputs, targets = case.batch(step)
        for rows in case.micro_batches():
            together = torch.cat(rows)
            share = F.cross_entropy(layers(inputs[together]), targets[together], reduction="sum", ignore_index=PADDING)
            (share / num_targets(targets)).backward()
        if step == 0:
            gradients = {f"gradient of layers.{name}": p.grad for name, p in layers.named_parameters()}
            found |= {name: gradient.numpy().copy() for name, gradient in gradients.items() if gradient is not None}
        for name, norm in averages.items():
            norm(torch.cat(seen[name]))
    for name, norm in averages.items():
        found |= {f"layers.{name}.{buffer}": value.numpy() for buffer, value in norm.named_buffers()}
    return found


def joined(answers: Sequence[Sequence[State]], number: int, layout: Layout) -> list[State]:
    """Return what each replica's processes have together of one case."""
    states = [answer[number] for answer in answers]
    size = layout.num_devices
    return [
        {name: value for state in states[first : first + size] for name, value in state.items()}
        for first in range(0, len(states), size)
    ]


def assert_close(found: State, expected: State, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=f"{what}, {name}")


def assert_equal(found: State, expected: State, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        assert np.array_equal(found[name], value, equal_nan=True), f"{what}, {name}"


@pytest.fixture(scope="module")
def six() -> Iterator[ProcessPool]:
    pool = ProcessPool(6)
    yield pool
    pool.close()


GPIPE = (Layout((8,)), Layout((2, 6)), Layout((1, 3, 4)))
ONE_FORWARD_ONE_BACKWARD = (
    Layout((8,), "1f1b"),
    Layout((1, 3, 4), "1f1b"),
    Layout((1, 2, 2, 3), "interleaved_1f1b", 2),
    Layout((2, 3, 3), "interleaved_1f1b", 3),
)


@pytest.mark.parametrize("layouts", [GPIPE, ONE_FORWARD_ONE_BACKWARD], ids=["gpipe", "1f1b"])
def test_gradients_are_those_of_one_process_and_the_same_bits_for_every_cut(
    layouts: tuple[Layout, ...], six: ProcessPool
) -> None:
    # Behind the pooling, some micro-batches of the second replica have one value per channel; in the last case all do.
    cases = [*(Case((7, 4), mode=mode) for mode in MODES), Case((1, 3), 2)]
    expected: dict[tuple[Any, ...], State] = {}
    for layout in layouts:
        answers = six.run(NUM_REPLICAS * layout.num_devices, train, layout, cases)
        for number, case in enumerate(cases):
            for replica, found in enumerate(joined(answers, number, layout)):
                what = f"{case}, {layout}, replica {replica}"
                if (first := expected.setdefault(replace(case, mode=""), found)) is found:
                    assert_close(found, plain(case), what)
                assert_equal(found, first, what)


def everything() -> nn.Sequential:
    kinds = ("branch", "norm", "dropout", "nest", "drop_path", "norm", "join", "sometimes", "channels_last", "norm")
    return nn.Sequential(build()[0], nn.Upsample(6), *random_layers(kinds))


def test_layers_of_all_kinds_have_the_same_bits_for_every_cut(processes: ProcessPool) -> None:
    cases = [Case((7, 5), 4, mode, layers=everything, dtype=torch.float32) for mode in MODES]
    expected = None
    for partitions in ((13,), (4, 9), (9, 4)):
        layout = Layout(partitions)
        answers = processes.run(NUM_REPLICAS * layout.num_devices, train, layout, cases)
        for number in range(len(cases)):
            for found in joined(answers, number, layout):
                expected = expected or found
                assert_equal(found, expected, f"{cases[number]}, {layout}")


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.data())
def test_uneven_parts_count_by_their_values(processes: ProcessPool, data: st.DataObject) -> None:
    num_replicas = data.draw(st.sampled_from((2, 3)))
    sizes = st.tuples(*[st.integers(1, 7)] * num_replicas)
    drawn = st.builds(Case, sizes, st.integers(1, 4), st.sampled_from(MODES))
    cases = data.draw(st.lists(drawn, min_size=5, max_size=5))
    for outcomes in processes.run(num_replicas, train_uneven, num_replicas, cases):
        for found, case in zip(outcomes, cases, strict=True):
            assert_close(found, plain(case), str(case))


def train_uneven(rank: int, num_replicas: int, cases: list[Case]) -> list[State]:
    layout = Layout((8,))
    mesh = mesh_of(layout, num_replicas)
    return [_train(case, layout, mesh) for case in cases]


def test_a_micro_batch_without_targets_takes_part_in_the_gradients_of_the_others(processes: ProcessPool) -> None:
    # The first and last micro-batch of replica 0; the last, whose backward is first, of replica 1; the second of both.
    paddings = ((0, 1, 4, 5), (10, 11), (2, 3, 8, 9))
    cases = [Case(mode=mode, padding=padding) for padding in paddings for mode in ("except_last", "never")]
    layout = Layout((2, 6))
    answers = processes.run(4, train, layout, cases)
    for number, case in enumerate(cases):
        for found in joined(answers, number, layout):
            assert_close(found, plain(case), str(case))


def test_frozen_layers_take_part_in_the_gradients_of_the_others(processes: ProcessPool) -> None:
    layout = Layout((3, 5))
    frozen = ((0, 1, 2), (0,), (1, 6))  # a whole stage; what is before the first norm; norms between others
    cases = [Case((5, 4), 2, mode, frozen=layers) for layers in frozen for mode in ("except_last", "never")]
    answers = processes.run(4, train, layout, cases)
    for number, case in enumerate(cases):
        for found in joined(answers, number, layout):
            assert_close(found, plain(case), str(case))


# torch.nn.SyncBatchNorm refuses the CPU, but the function that it calls does not, where its five kernels exist.


def _view(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 2))


def _over_channels(x: Tensor) -> list[int]:
    return [dimension for dimension in range(x.ndim) if dimension != 1]


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _over_channels(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts[:, None] / counts.sum()
    mean = (weights * means).sum(0)
    variance = (weights * (inverses**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (variance + eps).rsqrt()


def elements(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    y = (x - _view(mean, x)) * _view(inverse, x)
    return y if weight is None or bias is None else y * _view(weight, x) + _view(bias, x)


def reduce_backward(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy = dy.sum(_over_channels(x))
    sum_dy_xmu = (dy * (x - _view(mean, x))).sum(_over_channels(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * inverse, sum_dy.clone()


def elements_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    centered = dy - _view(sum_dy / total, x) - (x - _view(mean, x)) * _view(inverse**2 * sum_dy_xmu / total, x)
    return centered * _view(inverse if weight is None else inverse * weight, x)


KERNELS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elements,
    "batch_norm_backward_reduce": reduce_backward,
    "batch_norm_backward_elemt": elements_backward,
}


@dataclass(frozen=True)
class Part:
    """One batch norm, and how many examples each replica gives it."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    affine: bool
    momentum: float
    channels_last: bool
    dtype: torch.dtype = torch.float64


def beside_torchs(rank: int, parts: list[Part]) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return what our batch norm made of each part, beside what torch's SyncBatchNorm did."""
    library = operators.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    mesh = mesh_of(Layout((1,)), num_replicas=len(parts[0].sizes))
    try:
        return [_beside_torchs(rank, part, mesh) for part in parts]
    finally:
        library._destroy()


def _beside_torchs(rank: int, part: Part, mesh: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(part.shape)]
    generator = torch.Generator().manual_seed(1)
    whole, gradients = (
        torch.randn(sum(part.sizes), *part.shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    x, dy = (tensor.split(part.sizes)[rank].to(part.dtype) for tensor in (whole * 3 + 2, gradients))
    if part.channels_last:
        x, dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, dy))
    torchs = kind(part.shape[0], affine=part.affine, momentum=part.momentum).to(part.dtype)
    for number, parameter in enumerate(torchs.parameters()):
        torch.nn.init.uniform_(parameter, 0.5 + number, 2, generator=generator)
    ours = gpipe.convert_batch_norm(copy.deepcopy(torchs))
    pipeline = gpipe.Pipeline(
        nn.Sequential(ours), mean_loss, [1], mesh=mesh, timeout_seconds=10, synchronize_batch_norm=True
    )
    exchange = pipeline.stages[0].exchange
    assert exchange is not None
    ours_x, torchs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with microbatch_phase([ours], recompute=False, synchronized=exchange.start(notes=True)):
        ours_y = ours(ours_x)
    ours_y.backward(dy)
    pipeline._commit()
    torchs_y = SyncBatchNorm.apply(
        torchs_x, torchs.weight, torchs.bias, torchs.running_mean, torchs.running_var, torchs.eps, part.momentum,
        dist.group.WORLD, len(part.sizes),
    )  # fmt: skip
    torchs_y.backward(dy)
    pairs = {"output": (ours_y, torchs_y)}
    pairs |= {name: (getattr(ours, name), getattr(torchs, name)) for name in ("running_mean", "running_var")}
    if len(x):  # of an empty part torch gives no gradients
        pairs |= {"gradient of input": (ours_x.grad, torchs_x.grad)}
        pairs |= {f"gradient of {name}": (p.grad, getattr(torchs, name).grad) for name, p in ours.named_parameters()}
    pipeline.close()
    return {name: tuple(tensor.detach().numpy().copy() for tensor in pair) for name, pair in pairs.items()}


def parts(num_replicas: int) -> st.SearchStrategy[Part]:
    shapes = st.sampled_from([(3,), (3, 5), (3, 4, 4), (3, 2, 2, 2)])
    drawn = st.tuples(st.tuples(*[st.integers(0, 5)] * num_replicas), shapes)
    enough = drawn.filter(lambda found: sum(found[0]) * int(np.prod(found[1][1:])) > 1)

    def finish(found: tuple[tuple[int, ...], tuple[int, ...]]) -> st.SearchStrategy[Part]:
        sizes, shape = found
        channels_last = st.booleans() if len(shape) == 3 else st.just(False)
        return st.builds(Part, st.just(sizes), st.just(shape), st.booleans(), st.floats(0.0, 1.0), channels_last)

    return enough.flatmap(finish)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from((2, 3)))
def test_a_batch_norm_does_what_torchs_does(processes: ProcessPool, data: st.DataObject, num_replicas: int) -> None:
    drawn = data.draw(st.lists(parts(num_replicas), min_size=8, max_size=8))
    for rank, answers in enumerate(processes.run(num_replicas, beside_torchs, drawn)):
        for part, pairs in zip(drawn, answers, strict=True):
            for name, (found, expected) in pairs.items():
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=f"{part}, rank {rank}, {name}")


# What else a layer, a step and a pipeline may be.


def mixed() -> nn.Sequential:
    """Return layers in channels_last whose convolutions autocast makes compute in bfloat16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Tanh()),
            nn.Sequential(nn.Conv2d(8, 8, 2, bias=False), BatchNormAct2d(8)),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        )
    return layers.to(memory_format=torch.channels_last)


MIXED = Case((5, 3), 2, layers=mixed, dtype=torch.float32)


def step_in_bfloat16(rank: int) -> tuple[list[torch.dtype], State]:
    """Train under autocast; return the types of what the norms return, and what `train` does."""
    types: list[torch.dtype] = []

    def watched() -> nn.Sequential:
        layers = mixed()
        for layer in (layers[0], layers[1]):
            layer[1].register_forward_hook(lambda _, args, output: types.append(output.dtype))
        return layers

    layout = Layout((3,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _train(replace(MIXED, layers=watched), layout, mesh_of(layout))
    return types, found


def test_autocast_reaches_the_norms(processes: ProcessPool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(MIXED)
    for types, found in processes.run(2, step_in_bfloat16):
        assert types == [torch.bfloat16] * 16  # two norms, two micro-batches, each of them twice, in two steps
        assert found.keys() == expected.keys()
        for name, value in expected.items():  # of 8 bits, and some values cancel
            np.testing.assert_allclose(found[name], value, rtol=0, atol=0.03 * np.abs(value).max(), err_msg=name)


def train_compiled(rank: int) -> tuple[State, State, list[int]]:
    """Train plain and compiled; return also how many graphs there were after each compiled step."""
    found, counts = [], []
    mesh = mesh_of(Layout((3,)))
    for compiled in (False, True):
        case = Case((8, 8), 4, "except_last", layers=mixed, dtype=torch.float32)
        pipeline = pipeline_of(case, Layout((3,)), mesh)
        if compiled:
            torch._dynamo.reset()
            pipeline.compile(backend=lambda graph, _: counts.append(0) or graph)
        totals = []
        for step in range(2):
            pipeline.train_step(tuple(part.split(case.sizes)[rank] for part in case.batch(step)))
            totals.append(len(counts))
        found.append({name: value.detach().numpy() for name, value in pipeline.layers.state_dict().items()})
        found[-1] |= {f"gradient of {n}": p.grad.numpy() for n, p in pipeline.named_parameters() if p.grad is not None}
        pipeline.close()
    return (*found, totals)


def test_compiled_layers_are_interrupted_by_their_norms(processes: ProcessPool) -> None:
    for plain_state, compiled_state, counts in processes.run(2, train_compiled):
        assert_equal(compiled_state, plain_state, "compiled")
        assert counts[0] == counts[1] > 0, "the second step compiled again"


def evaluate_apart(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Train a step, then evaluate in each replica as often as it likes; return what comes out, and what should."""
    case, layout = Case(), Layout((8,))
    pipeline = pipeline_of(case, layout, mesh_of(layout))
    pipeline.train_step(tuple(part.split(case.sizes)[rank] for part in case.batch()))
    inputs = case.batch(1)[0][: 3 + 4 * rank]
    found = pipeline.evaluate(inputs)
    layers = nn.Sequential(*pipeline.layers.values()).eval()
    expected = torch.cat([layers(part) for part in inputs.split(microbatch_sizes(len(inputs), case.num_microbatches))])
    for _ in range(rank):  # alone
        pipeline.evaluate(inputs)
    pipeline.close()
    return found.numpy(), expected.detach().numpy()


def test_replicas_evaluate_on_their_own(processes: ProcessPool) -> None:
    for found, expected in processes.run(2, evaluate_apart):
        assert np.array_equal(found, expected)


def find_the_infinity(rank: int) -> tuple[str, State]:
    """Train on an infinity, look for it, and train on."""
    case = Case(layers=lambda: nn.Sequential(build()[0], nn.BatchNorm2d(4).double(), *build()[1:]))
    layout = Layout((3, 6))
    pipeline = pipeline_of(case, layout, mesh_of(layout))
    inputs, targets = (part.split(case.sizes)[pipeline.replica_index].clone() for part in case.batch())
    spoiled = inputs * (torch.inf if pipeline.replica_index == 1 else 1)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step((spoiled, targets))
    place = str(pipeline.first_non_finite((spoiled, targets)))
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.train_step((inputs, targets))
    found = {f"gradient of {n}": p.grad.numpy() for n, p in pipeline.named_parameters() if p.grad is not None}
    pipeline.close()
    return place, found


def test_a_number_that_is_not_finite_is_found_and_forgotten(processes: ProcessPool) -> None:
    expected = plain(Case(layers=lambda: nn.Sequential(build()[0], nn.BatchNorm2d(4).double(), *build()[1:])))
    for place, found in processes.run(4, find_the_infinity):
        assert place == "layer 0 (Conv2d) in stage 0, micro-batch 0 of replica 1"
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


class Rows(nn.Module):
    """Normalises some of its examples, by their first number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return torch.zeros_like(x).index_put((chosen,), self.norm(x[chosen]))


def choose_rows(rank: int, num_chosen: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | str:
    """Normalise so many rows of each replica; return the moving average beside the mean, or the error."""
    mesh = mesh_of(Layout((2,)))
    inputs = [torch.cat([torch.rand(4, 1, dtype=torch.float64) + 0.1, torch.randn(4, 2).double()], 1) for _ in range(2)]
    for x, number in zip(inputs, num_chosen, strict=True):
        x[number:, 0] = -1
    norm = Rows().double()
    norm.norm.momentum = 1.0
    layers = nn.Sequential(gpipe.convert_batch_norm(norm), nn.Linear(3, 3).double())
    pipeline = gpipe.Pipeline(layers, mean_loss, [2], 1, mesh=mesh, timeout_seconds=10, synchronize_batch_norm=True)
    try:
        pipeline.train_step((inputs[rank], torch.zeros(4, dtype=torch.long)))
    except gpipe.PipelineError as error:
        return str(error)
    chosen = torch.cat([x[:number] for x, number in zip(inputs, num_chosen, strict=True)])
    pipeline.close()
    return norm.norm.running_mean.numpy(), chosen.mean(0).numpy()


def test_a_part_may_be_empty_but_not_all_values_but_one(processes: ProcessPool) -> None:
    for found, expected in processes.run(2, seeded, choose_rows, (0, 3)):
        np.testing.assert_allclose(found, expected, rtol=1e-13)
    for found, expected in processes.run(2, seeded, choose_rows, (1, 1)):
        np.testing.assert_allclose(found, expected, rtol=1e-13)
    for message in processes.run(2, seeded, choose_rows, (0, 1)):
        assert "the batch norm sees one value per channel over all replicas" in message
        assert "stage 0, micro-batch 0, layer 0 (Rows), forward" in message


def seeded(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(rank, *args)


class Fork(nn.Module):
    """Uses another norm for positive inputs than for others."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if bool((x > 0).all()) else self.other(x)


class ByHand(nn.BatchNorm1d):
    """Normalises without F.batch_norm."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return (input - input.mean(0)) / input.std(0)


def fail_to_synchronize(rank: int, layer: type[nn.Module]) -> str:
    layers = nn.Sequential(nn.Identity(), layer(3) if layer is ByHand else layer(), nn.Linear(3, 3))
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(layers), mean_loss, [3], 2, mesh=mesh_of(Layout((3,))), timeout_seconds=10,
        synchronize_batch_norm=True,
    )  # fmt: skip
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step((torch.rand(8, 3) + 0.1 - 2 * rank, torch.zeros(8, dtype=torch.long)))
    return str(error.value)


def test_replicas_that_use_different_norms_are_told_so(processes: ProcessPool) -> None:
    for message in processes.run(2, fail_to_synchronize, Fork):
        assert "replica 0 runs the forward of layers.1.positive while replica 1 runs the forward of layers.1.other" in (
            message
        )


def test_a_norm_that_cannot_be_synchronised_is_refused(processes: ProcessPool) -> None:
    for message in processes.run(2, fail_to_synchronize, ByHand):
        assert "ByHand does not call torch.nn.functional.batch_norm, which alone can be synchronised" in message


def disagree(rank: int, other: dict[str, Any]) -> str:
    mesh = mesh_of(Layout((8,)))
    given: dict[str, Any] = {"synchronize_batch_norm": True, "num_microbatches": 4}
    given |= other if rank == 1 else {}
    with pytest.raises(ValueError, match="give every process the same") as error:
        gpipe.Pipeline(gpipe.convert_batch_norm(build()), mean_loss, [8], mesh=mesh, timeout_seconds=10, **given)
    return str(error.value)


def test_replicas_that_were_given_different_settings_are_told_so(processes: ProcessPool) -> None:
    for message in processes.run(2, disagree, {"synchronize_batch_norm": False}):
        assert (
            message == "synchronize_batch_norm is True in replica 0 and False in replica 1; give every process the same"
        )
    for message in processes.run(2, disagree, {"num_microbatches": 1}):
        assert message == "num_microbatches is 4 in replica 0 and 1 in replica 1; give every process the same"


@pytest.mark.parametrize("mode", MODES)
def test_without_replicas_nothing_changes(mode: str) -> None:
    states = [
        _train(Case((7,), 3, mode, synchronized=synchronized), Layout((8,)), None) for synchronized in (False, True)
    ]
    assert_equal(*states, mode)
