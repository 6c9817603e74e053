"""A split backward leaves gradients of weights for later, and both parts together have the bits of a whole one."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.pipeline.layers import split_backward
from gpipe.pipeline.layers.entry import _ANCHOR, _Entry
from gpipe.pipeline.layers.split_backward import run_split_backward
from tests.support.calling_backward import CallingBackward


class Of(nn.Module):
    """A function of modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(modules), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        getattr(module, name).requires_grad_(False)
    return module


def offloaded(x: Tensor, module: nn.Module) -> Tensor:
    with save_on_cpu():
        out: Tensor = module(x)
    return out


def as_complex(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.view_as_real(function(torch.complex(x, 2 - x))).flatten(-2)


# A layer, the shape of its input, and the parameters that wait.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4), {"weight", "bias"}),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4), {"weight"}),
    "linear of three dimensions": (lambda: nn.Linear(4, 3, bias=False), (2, 5, 4), {"weight"}),
    "frozen bias": (lambda: frozen(nn.Linear(4, 3), "bias"), (2, 5, 4), {"weight"}),
    "frozen weight": (lambda: frozen(nn.Linear(4, 3), "weight"), (5, 4), set()),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2), (2, 4, 5, 5), {"weight", "bias"}),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, bias=False), (2, 4, 5), {"weight"}),
    "weight to the right": (lambda: Of(lambda x, m: x @ m.weight, nn.Linear(3, 4)), (5, 4), {"parts.0.weight"}),
    "weight to the left": (lambda: Of(lambda x, m: m.weight @ x, nn.Linear(5, 3)), (5, 4), set()),
    "scaled": (
        lambda: Of(lambda x, m: torch.addmm(m.bias, x, m.weight.t(), alpha=2.0), nn.Linear(4, 3)),
        (5, 4),
        set(),
    ),
    "complex": (
        lambda: Of(as_complex, nn.Linear(4, 3, dtype=torch.complex64)),
        (5, 4),
        {"parts.0.weight", "parts.0.bias"},
    ),
    "complex weight to the right": (
        lambda: Of(lambda x, m: as_complex(x, lambda z: z @ m.weight), nn.Linear(3, 4, dtype=torch.complex64)),
        (5, 4),
        {"parts.0.weight"},
    ),
    "used twice": (lambda: Of(lambda x, m: m(m(x).relu()), nn.Linear(4, 4)), (5, 4), set()),
    "in a row": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)),
        (5, 4),
        {"0.weight", "0.bias", "3.weight", "3.bias"},
    ),
    "weight that is normalised": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4), set()),
    "transposed and cast": (
        lambda: Of(lambda x, m: x @ m.weight.double().t().float(), nn.Linear(4, 3)),
        (5, 4),
        {"parts.0.weight"},
    ),
    "checkpoint": (
        lambda: Of(lambda x, a, b: b(checkpoint(a, x, use_reentrant=False)), nn.Linear(4, 4), nn.Linear(4, 3)),
        (5, 4),
        {"parts.1.weight", "parts.1.bias"},
    ),
    "reentrant checkpoint": (
        lambda: Of(lambda x, a, b: b(checkpoint(a, x, use_reentrant=True)), nn.Linear(4, 4), nn.Linear(4, 3)),
        (5, 4),
        set(),
    ),
    "offloaded": (lambda: Of(offloaded, nn.Linear(4, 3)), (5, 4), set()),
    "GRU": (lambda: Of(lambda x, m: m(x)[0], nn.GRU(4, 3)), (5, 2, 4), {"parts.0.weight_ih_l0", "parts.0.bias_ih_l0"}),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        (2, 5, 4),
        {f"{name}.{part}" for name in ("linear1", "linear2", "self_attn.out_proj") for part in ("weight", "bias")}
        | {"self_attn.in_proj_weight"},  # its bias is added apart
    ),
}


def run(layer: nn.Module, x: Tensor, *, splits: bool) -> tuple[Tensor | None, set[str]]:
    """Add a backward's gradients; return that of the input, and the names of the parameters that waited."""
    gradients: list[Tensor | None] = [None]
    (entered,) = _Entry.apply(gradients, _ANCHOR, x)
    y = layer(entered)
    before = {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
    seed = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    if not splits:
        y.backward(seed)
        return gradients[0], set()
    waiting = run_split_backward([(get_gradient_edge(y), seed)])
    assert gradients[0] is not None
    found = gradients[0].clone()

    def is_new(name: str, gradient: Tensor | None) -> bool:
        old = before[name]
        return gradient is not None and (old is None or not torch.equal(old, gradient))

    early = {name for name, p in layer.named_parameters() if is_new(name, p.grad)}
    waiting.compute()
    late = {name for name, p in layer.named_parameters() if is_new(name, p.grad)} - early
    assert torch.equal(gradients[0], found), "the second part leaves the first one's gradients alone"
    return found, late


@pytest.mark.parametrize("name", LAYERS)
def test_both_parts_have_the_bits_of_one_backward(name: str) -> None:
    make, shape, expected = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    plain = copy.deepcopy(layer)
    for x in torch.randn(2, *shape):  # the second adds to the first
        whole, _ = run(plain, x, splits=False)
        parts, late = run(layer, x, splits=True)
        assert late == expected
        assert parts is not None and whole is not None and torch.equal(parts, whole)
        for (key, parameter), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
            if other.grad is None:
                assert parameter.grad is None, key
            else:
                assert torch.equal(parameter.grad, other.grad), key


def test_products_have_the_bits_of_one_backward_under_autocast() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3))
    plain = copy.deepcopy(layer)
    x = torch.randn(4, 8, requires_grad=True)
    for model, splits in ((layer, True), (plain, False)):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        if splits:
            run_split_backward([(get_gradient_edge(y), torch.ones_like(y))]).compute()
        else:
            y.backward(torch.ones_like(y))
    for parameter, other in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "a row is added": lambda x, w, b: [torch.addmm(b[:1], x, w)],
    "a matrix is added": lambda x, w, b: [torch.addmm(b, x, w)],
    "the summand counts twice": lambda x, w, b: [torch.addmm(b, x, w, beta=2)],
    "the product counts twice": lambda x, w, b: [torch.addmm(b, x, w, alpha=2)],
    "nothing comes of it": lambda x, w, b: [x @ w[:, :0], b],
    "its transposed weight is an output too": lambda x, w, b: [x @ (t := w.t()), t, b],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_a_kind_has_the_gradients_of_one_backward(name: str) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    own, plain = ([nn.Parameter(torch.full((4, 4), 0.5)), nn.Parameter(torch.full((5, 4), 0.3))] for _ in range(2))
    outputs = PRODUCTS[name](x, *own)
    run_split_backward([(get_gradient_edge(one), torch.ones_like(one)) for one in outputs]).compute()
    sum(one.sum() for one in PRODUCTS[name](x, *plain)).backward()
    for parameter, other in zip(own, plain, strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_hooks_of_parameters_run_once_and_change_what_they_are_given() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    calls: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(name) or gradient * 2)
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(f"{name} after"))
    plain = copy.deepcopy(layer)  # without hooks
    x = torch.randn(5, 4, requires_grad=True)
    y = layer(x)
    run_split_backward([(get_gradient_edge(y.sum()), None)]).compute()
    plain(x).sum().backward()
    names = [name for name, _ in layer.named_parameters()]
    assert sorted(calls) == sorted(names + [f"{name} after" for name in names])
    for parameter, other in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad * 2)


@pytest.mark.parametrize("register", [Tensor.register_hook, nn.Parameter.register_post_accumulate_grad_hook])
def test_hooks_of_either_kind_run_also_where_there_is_a_gradient_already(register: Callable[..., Any]) -> None:
    layer, calls = nn.Linear(4, 3), []
    for parameter in layer.parameters():
        register(parameter, calls.append)
    for number in range(1, 4):
        y = layer(torch.randn(5, 4, requires_grad=True))
        run_split_backward([(get_gradient_edge(y.sum()), None)]).compute()
        assert len(calls) == 2 * number


@pytest.mark.parametrize(("cache_bytes", "num_backwards"), [(0, 3), (2**20, 1)])
def test_gradients_go_through_autograd_once_and_as_many_together_as_a_cache_holds(
    cache_bytes: int, num_backwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain, x = copy.deepcopy(layer), torch.randn(5, 4, requires_grad=True)
    waiting = run_split_backward([(get_gradient_edge(layer(x).sum()), None)])
    backward = mock.Mock(wraps=split_backward.run_backward)
    monkeypatch.setattr(split_backward, "run_backward", backward)
    monkeypatch.setattr(split_backward, "CACHE_BYTES", cache_bytes)
    waiting.compute()
    plain(x).sum().backward()
    assert backward.call_count == num_backwards
    for parameter, other in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


class OwnBackward(torch.autograd.Function):
    """Returns a tensor's copy, with a backward of the test's own."""

    @staticmethod
    def forward(context: Any, x: Tensor, backward: Callable[[Tensor], Tensor | None]) -> Tensor:
        context.own = backward
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return context.own(gradient), None


def test_a_product_whose_output_gets_no_gradient_has_none_to_wait() -> None:
    one, other, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    y = OwnBackward.apply(one(x), lambda _: None) + other(x)
    run_split_backward([(get_gradient_edge(y.sum()), None)]).compute()
    assert [parameter.grad is None for parameter in (*one.parameters(), *other.parameters())] == [True] * 2 + [
        False
    ] * 2


def test_a_first_layer_whose_input_wants_no_gradient_does_not_wait() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    y = layer(torch.randn(5, 4))
    waiting = run_split_backward([(get_gradient_edge(y.sum()), None)])
    assert [p.grad is None for p in layer.parameters()] == [False, False, True, True]
    waiting.compute()
    assert all(p.grad is not None for p in layer.parameters())


def test_what_waits_holds_the_activations_of_products_and_no_graph() -> None:
    alive = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            kept = torch.ones(3)
            alive.append(torch.utils.weak.WeakIdKeyDictionary({kept: None}))
            ctx.save_for_backward(kept)
            return x * 1.0

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
            return gradient

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    layer = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 4), Layer())
    y = layer(torch.randn(5, 4, requires_grad=True))
    root = [(get_gradient_edge(y.sum()), None)]
    del y
    waiting = run_split_backward(root)
    del root
    assert [len(kept) for kept in alive] == [0, 0]
    waiting.compute()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("first", [nn.ReLU, nn.Identity])
def test_what_waits_lets_go_of_the_gradient_of_the_input(first: type[nn.Module]) -> None:
    layer = nn.Sequential(first(), nn.Linear(4, 4))
    x = torch.randn(5, 4, requires_grad=True)
    waiting = run_split_backward([(get_gradient_edge(layer(x).sum()), None)])
    assert x.grad is not None
    gradient = weakref.ref(x.grad.untyped_storage())
    del x
    assert gradient() is None
    waiting.compute()
    assert all(p.grad is not None for p in layer.parameters())


def test_each_weight_tells_where_its_product_stood_in_the_backward() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    where = "after 2"
    hidden = torch.randn(5, 4, requires_grad=True)
    for index, part in enumerate(layer):
        hidden = part(hidden)

        def come(_: Tensor, index: int = index) -> None:
            nonlocal where
            where = f"layer {index}"

        hidden.register_hook(come)
    told: list[str] = []
    run_split_backward([(get_gradient_edge(hidden.sum()), None)], lambda: where).compute(told.append)
    assert told == ["layer 2", "layer 0"]


@pytest.mark.parametrize(
    ("make", "shape", "flops"),
    [
        (lambda: nn.Linear(4, 3), (2, 5, 4), 2 * 10 * 4 * 3),
        (lambda: nn.Linear(4, 3, bias=False), (5, 4), 2 * 5 * 4 * 3),
        (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 5, 5), 2 * (2 * 3 * 3) * (6 * 2 * 3 * 3)),
    ],
    ids=["linear", "linear without bias", "convolution"],
)
def test_a_product_waits_whose_gradient_is_as_much_work_as_the_limit(
    make: Callable[[], nn.Module], shape: tuple[int, ...], flops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    for limit in (flops, flops + 1):
        monkeypatch.setattr(split_backward, "SMALL_PRODUCT", limit)
        layer = make()
        waiting = run_split_backward([(get_gradient_edge(layer(torch.randn(shape, requires_grad=True)).sum()), None)])
        waited.append([parameter.grad is None for parameter in layer.parameters()])
        waiting.compute()
        assert all(parameter.grad is not None for parameter in layer.parameters())
    at_limit, below = waited
    assert all(at_limit) and not any(below)


@pytest.mark.parametrize("function", [F.cross_entropy, F.mse_loss], ids=["labels", "numbers"])
def test_a_graph_without_products_is_an_ordinary_backward(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    norm = nn.LayerNorm(4)
    targets = torch.rand(5, 4) if function is F.mse_loss else torch.tensor([0, 1, 2, 3, 0])
    for _ in itertools.repeat(None, 2):
        waiting = run_split_backward([(get_gradient_edge(function(norm(torch.randn(5, 4)), targets)), None)])
        assert all(p.grad is not None for p in norm.parameters())
        waiting.compute()


def test_inputs_that_change_before_the_gradient_of_the_weight_are_refused() -> None:
    layer, pad = nn.Linear(3, 2), torch.zeros(4, 3)
    pad.add_(torch.ones(4, 3, requires_grad=True))
    run_split_backward([(get_gradient_edge(layer(pad)), torch.ones(4, 2))]).compute()  # a change before is none
    waiting = run_split_backward([(get_gradient_edge(layer(pad)), torch.ones(4, 2))])
    with torch.no_grad():
        pad.zero_()
    with pytest.raises(RuntimeError, match=r"^the input of a product, of shape \(4, 3\), was changed in place before"):
        waiting.compute()


def test_a_gradient_that_a_backward_changes_before_that_of_the_weight_is_refused() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    y = OwnBackward.apply(x, Tensor.neg_) + nn.Linear(3, 3)(x)
    waiting = run_split_backward([(get_gradient_edge(y), torch.ones(4, 3))])
    with pytest.raises(
        RuntimeError, match=r"^the output's gradient of a product, of shape \(4, 3\), was changed in pl"
    ):
        waiting.compute()


def test_a_hook_of_a_transposed_weight_runs_also_where_there_is_a_gradient_already() -> None:
    own, plain = (nn.Parameter(torch.full((3, 4), 0.5)) for _ in range(2))
    for x in torch.randn(2, 5, 4, requires_grad=True):
        outputs = []
        for parameter in (own, plain):
            weight = parameter.t()
            weight.register_hook(lambda gradient: gradient * 2)
            outputs.append((x @ weight).sum())
        run_split_backward([(get_gradient_edge(outputs[0]), None)]).compute()
        outputs[1].backward()
        assert torch.equal(own.grad, plain.grad)


def test_after_a_step_that_failed_no_gradient_waits() -> None:
    waiting = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        waiting.append(sum(len(stage._waiting) for stage in pipeline.stages.values()))
        if waiting[-1]:
            raise OSError
        return F.mse_loss(outputs, targets)

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, loss, [1, 1], 4, schedule="zb_h1")
    with pytest.raises(gpipe.PipelineError):
        pipeline.train_step((torch.ones(4, 4), torch.ones(4, 4)))
    assert waiting[-1] and not any(stage._waiting for stage in pipeline.stages.values())


def test_no_graph_waits_for_the_garbage_collector() -> None:
    hidden = CallingBackward.apply(torch.randn(5, 4, requires_grad=True), int)
    node = weakref.ref(hidden.grad_fn)
    roots = [(get_gradient_edge(nn.Linear(4, 3)(hidden).sum()), None)]
    del hidden
    gc.disable()
    try:
        run_split_backward(roots).compute()
        roots.clear()
        assert node() is None
    finally:
        gc.enable()
