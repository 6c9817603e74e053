"""A forward that will be recomputed needs no graph where the kernels are the same, and only there it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import gpipe
from gpipe.models import amoebanet_b, amoebanet_d
from gpipe.pipeline.layers.entry import enter_graph
from gpipe.pipeline.layers.first_forward import _SAME_WITHOUT_GRAPH, without_saved_tensors
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.randomness import seed_generators
from gpipe.pipeline.stage import Stage

DEVICES = ["cpu", *([pytest.param("cuda", id="real")] if torch.cuda.is_available() else [])]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

Draw = Callable[[st.SearchStrategy[Any]], Any]
NUMBERS = st.integers(1, 20)
SIZES = st.integers(3, 12)


def draw_convolution(draw: Draw, kind: type[nn.Conv1d | nn.Conv2d]) -> nn.Module:
    return kind(
        4,
        4 * draw(NUMBERS),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([0, 1])),
        groups=draw(st.sampled_from([1, 2, 4])),
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "circular"])),
    )


def draw_norm(draw: Draw, kind: type[nn.BatchNorm1d | nn.BatchNorm2d]) -> nn.Module:
    norm = kind(4, affine=draw(st.booleans()))
    return gpipe.convert_batch_norm(norm) if draw(st.booleans()) else norm


MAKERS: dict[type[nn.Module], Callable[[Draw], nn.Module]] = {
    nn.AdaptiveAvgPool2d: lambda draw: nn.AdaptiveAvgPool2d(draw(st.sampled_from([1, 2, 3]))),
    nn.AvgPool2d: lambda draw: nn.AvgPool2d(3, draw(st.sampled_from([1, 2])), draw(st.sampled_from([0, 1]))),
    nn.BatchNorm1d: lambda draw: draw_norm(draw, nn.BatchNorm1d),
    nn.BatchNorm2d: lambda draw: draw_norm(draw, nn.BatchNorm2d),
    nn.Conv1d: lambda draw: draw_convolution(draw, nn.Conv1d),
    nn.Conv2d: lambda draw: draw_convolution(draw, nn.Conv2d),
    nn.Dropout: lambda draw: nn.Dropout(draw(st.sampled_from([0.0, 0.1, 0.5]))),
    nn.Embedding: lambda draw: nn.Embedding(11, draw(NUMBERS), padding_idx=draw(st.sampled_from([None, 0]))),
    nn.Flatten: lambda draw: nn.Flatten(draw(st.sampled_from([1, 2]))),
    nn.GELU: lambda draw: nn.GELU(draw(st.sampled_from(["none", "tanh"]))),
    nn.GroupNorm: lambda draw: nn.GroupNorm(draw(st.sampled_from([1, 2])), 4, affine=draw(st.booleans())),
    nn.Identity: lambda _: nn.Identity(),
    nn.LayerNorm: lambda draw: nn.LayerNorm(8, elementwise_affine=draw(st.booleans())),
    nn.Linear: lambda draw: nn.Linear(8, draw(NUMBERS), bias=draw(st.booleans())),
    nn.MaxPool2d: lambda draw: nn.MaxPool2d(3, draw(st.sampled_from([1, 2])), draw(st.sampled_from([0, 1]))),
    nn.ReLU: lambda draw: nn.ReLU(inplace=draw(st.booleans())),
    nn.Sequential: lambda draw: nn.Sequential(nn.Linear(8, draw(NUMBERS)), nn.ReLU(inplace=True)),
    nn.SiLU: lambda draw: nn.SiLU(inplace=draw(st.booleans())),
    nn.Sigmoid: lambda _: nn.Sigmoid(),
    nn.Tanh: lambda _: nn.Tanh(),
}
CONTAINERS = {nn.ModuleDict, nn.ModuleList}  # without a forward


def draw_input(draw: Draw, kind: type[nn.Module], dtype: torch.dtype) -> Tensor:
    """Return an input: [n, 4, height, width], [n, 4, length], [n, ..., 8] or tokens; contiguous or not."""
    n = draw(NUMBERS)
    if kind is nn.Embedding:
        return torch.randint(11, (n, draw(SIZES)))
    if kind in (nn.Linear, nn.LayerNorm, nn.Sequential):
        shape = (n, *draw(st.lists(NUMBERS, max_size=2)), 8)
    elif kind in (nn.BatchNorm1d, nn.Conv1d):
        shape = (n + 1, 4, draw(SIZES))
    else:
        shape = (n, 4, draw(SIZES), draw(SIZES))
    layout = draw(st.sampled_from(["contiguous", "channels_last", "sliced"]))
    if layout == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    value = torch.randn(shape).to(dtype)
    return value.contiguous(memory_format=torch.channels_last) if layout != "contiguous" and value.ndim == 4 else value


def run(module: nn.Module, value: Tensor, *, with_graph: bool) -> tuple[Payload, list[Tensor]]:
    """Return the outputs of a forward whose graph keeps nothing, or of one without, and the buffers after it."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    seed_generators(1, value.device if value.is_cuda else None, others=False)
    with without_saved_tensors() if with_graph else torch.no_grad():
        outputs = Payload.of(module(value))
    after = [buffer.clone() for buffer in module.buffers()]
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    return outputs, after


def copy_exactly(tensor: Tensor) -> Tensor:
    """Return a copy of the same strides: those of dimensions of one element decide which kernel runs, too."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype is other.dtype
    assert one.stride() == other.stride()
    one, other = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_module_of_torch_has_the_bits_that_it_has_in_a_graph(
    kind: type[nn.Module], device: str, data: st.DataObject
) -> None:
    torch.manual_seed(0)
    dtype = data.draw(st.sampled_from(DTYPES))
    module = MAKERS[kind](data.draw).to(device, dtype)
    value = draw_input(data.draw, kind, dtype).to(device)
    is_wanted = value.is_floating_point() and data.draw(st.booleans())
    inputs = Payload([copy_exactly(value)], 0, [is_wanted])
    with torch.autocast(device, torch.bfloat16, enabled=data.draw(st.booleans())):
        in_graph, buffers = run(module, enter_graph(inputs, []).value(), with_graph=True)
        without, buffers_without = run(module, copy_exactly(value), with_graph=False)
    for one, other in zip([*in_graph.tensors, *buffers], [*without.tensors, *buffers_without], strict=True):
        assert_same_bits(one.detach(), other)


def test_every_module_that_needs_no_graph_is_tried() -> None:
    assert set(MAKERS) | CONTAINERS == _SAME_WITHOUT_GRAPH


class Notes(nn.Module):
    """Says that it needs no graph, and notes whether it got one."""

    same_without_graph = True

    def __init__(self) -> None:
        super().__init__()
        self.had_graph: list[bool] = []

    def forward(self, value: Tensor) -> Tensor:
        self.had_graph.append(torch.is_grad_enabled())
        return value * 2


class Inherits(Notes):
    """May do anything in a forward of its own."""


class Unknown(nn.Module):
    """Says nothing."""

    def forward(self, value: Tensor) -> Tensor:
        return value


class Foreign(nn.GELU):
    """Of the tests' package, as the layer that it is put into."""


def with_hook() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_forward() -> nn.Module:
    layer = nn.ReLU()
    layer.forward = lambda value: value.abs()  # type: ignore[method-assign]
    return layer


def holding(module: nn.Module) -> nn.Module:
    """Return a layer that says that it needs no graph, with a module below it."""
    layer = Notes()
    layer.below = module
    return layer


BESIDE: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "known": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)), False),
    "one of ours below a layer that says so": (lambda: holding(Foreign()), False),
    "one of ours by itself": (Foreign, True),
    "one that inherits the word": (Inherits, True),
    "one of another package below a layer that says so": (lambda: holding(nn.LSTM(8, 8)), True),
    "unknown": (Unknown, True),
    "unknown below": (lambda: nn.Sequential(Unknown()), True),
    "a converted batch norm": (lambda: gpipe.convert_batch_norm(nn.BatchNorm1d(8)), False),
    "a converted batch norm of an untested kind": (lambda: holding(gpipe.convert_batch_norm(nn.BatchNorm3d(8))), True),
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), True),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), True),
    "hook": (with_hook, True),
    "own forward": (with_forward, True),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_stage_does_without_a_graph_where_all_its_layers_may(beside: str) -> None:
    make, needs_graph = BESIDE[beside]
    noting = Notes()
    layers = nn.Sequential(noting, nn.Identity(), make())
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [3], 2, rematerialize="always")
    if beside == "attention":
        batch = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    else:
        batch = torch.randn(4, 8), torch.randn(4, 8)
    pipeline.train_step(batch)
    assert noting.had_graph == [needs_graph] * 2 + [True] * 2


@pytest.mark.parametrize(("is_cached", "had_graph"), [(True, [True, False, False]), (False, [False] * 3)])
def test_under_autocast_the_first_forward_of_a_step_gives_the_converted_weights_their_graphs(
    is_cached: bool, had_graph: list[bool]
) -> None:
    noting = Notes()
    layers = nn.Sequential(noting, nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [4], 3, rematerialize="always")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
        for _ in range(2):
            pipeline.train_step((torch.randn(6, 8), torch.randn(6, 8)))
    assert noting.had_graph == (had_graph + [True] * 3) * 2


FROZEN: dict[str, slice] = {
    "nothing": slice(0),
    "the stem": slice(1),
    "a backbone": slice(-1),
    "the middle": slice(3, 5),
}


def sum_losses(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(output, targets) for output in outputs]).sum()


MODES = ("always", "except_last")


# Eight of the 32: each pair of two of them.
@pytest.mark.parametrize(
    ("make", "frozen", "autocast", "mode"),
    [
        (make, frozen, (row + column) % 2 == 1, MODES[(row // 2 + column) % 2])
        for row, frozen in enumerate(FROZEN)
        for column, make in enumerate((amoebanet_b, amoebanet_d))
    ],
)
def test_amoebanet_does_without_a_graph(
    make: Callable[..., nn.Sequential], frozen: str, autocast: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[list[bool]] = []
    run_without_graph = Stage._run_without_graph

    def note(self: Stage, *args: Any) -> Payload:
        outputs = run_without_graph(self, *args)
        flags.append(outputs.differentiable)
        return outputs

    def train() -> tuple[list[list[bool]], list[Tensor | None]]:
        flags.clear()
        torch.manual_seed(0)
        layers = gpipe.convert_batch_norm(
            make(6, 16, 10, image_size=(32, 32), drop_path=0.2, dropout=0.2, auxiliary_head=True)
        )
        for layer in layers[FROZEN[frozen]]:
            layer.requires_grad_(False)
        partitions = [2, 3, len(layers) - 5]
        pipeline = gpipe.Pipeline(layers, sum_losses, partitions, 3, rematerialize=mode, check_recomputation=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            pipeline.train_step((torch.randn(6, 3, 32, 32), torch.randint(10, (6,))))
        return list(flags), [parameter.grad for parameter in pipeline.parameters()]

    monkeypatch.setattr(Stage, "_run_without_graph", note)
    without, gradients = train()
    monkeypatch.setattr("gpipe.pipeline.stage.is_same_without_graph", lambda _: False)
    with_graph, expected = train()
    assert without == with_graph
    for one, other in zip(gradients, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


class Shift(nn.Module):
    """Adds a parameter to its input, in place."""

    same_without_graph = True

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.shift)


def test_a_parameter_that_is_added_in_place_to_a_constant_gets_its_gradient() -> None:
    gradients = []
    for partitions in ([3], [2, 1]):
        layers = nn.Sequential(nn.Embedding(5, 4), Shift(), nn.Linear(4, 4))
        layers[0].requires_grad_(False)
        for parameter in layers.parameters():
            nn.init.constant_(parameter, 0.5)
        pipeline = gpipe.Pipeline(layers, F.mse_loss, partitions, 2)
        pipeline.train_step((torch.arange(4), torch.ones(4, 4)))
        gradients.append(layers[1].shift.grad)
    assert torch.equal(*gradients)
