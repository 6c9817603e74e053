"""What a model keeps stays its own: tensors that its code makes, buffers, attributes and hooks."""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.tracing.errors import TracingError
from tests.tracing.models import Parts


class Remembers(nn.Module):
    """Keeps a table, counts in a buffer, and may keep what it saw last."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.linear, self.table, self.what = nn.Linear(3, 3), None, what
        self.last: Any = None
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1])
        self.seen += 1
        x = self.linear(x) + self.table + self.seen
        if self.what == "attribute":
            self.last = x
        if self.what == "buffer":
            self.seen = self.seen.clone()
        return x


def test_a_model_keeps_nothing_of_being_recorded_and_its_layers_count_as_it_does() -> None:
    model = Remembers()
    layers = gpipe.as_layers(model, torch.zeros(2, 3))
    assert model.table is None and torch.equal(model.seen, torch.zeros(3))
    plain, x = copy.deepcopy(model), torch.randn(4, 3)
    for _ in range(2):
        assert torch.equal(layers(x), plain(x))
    assert torch.equal(model.seen, torch.full((3,), 2.0))


@pytest.mark.parametrize("what", ["attribute", "buffer"])
def test_what_keeps_what_it_computed_is_one_operation_or_refused(what: str) -> None:
    name = {"attribute": "last", "buffer": "seen"}[what]
    with pytest.raises(
        TracingError,
        match=rf"test_kept_state\.py, line \d+: stores a tensor in its attribute or buffer {name}, which a layer",
    ):
        gpipe.as_layers(Remembers(what), torch.zeros(2, 3))
    model = nn.Sequential(Remembers(what), nn.Linear(3, 3))
    layers = gpipe.as_layers(model, torch.zeros(2, 3))
    assert layers.leaves == ["Remembers"] and model[0].last is None
    plain, x = copy.deepcopy(model), torch.randn(4, 3)
    for _ in range(2):
        assert torch.equal(layers(x), plain(x))
    assert torch.equal(model[0].seen, plain[0].seen)


class Keeps(nn.Module):
    """Puts what it computed where a loss may find it."""

    def __init__(self, attribute: Any, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.kept, self.keep = nn.Linear(3, 3), attribute, keep

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.keep(self, x)
        return x


@pytest.mark.parametrize(
    ("attribute", "keep"),
    [
        ([], lambda self, x: self.kept.append(x)),
        (deque(maxlen=1), lambda self, x: self.kept.append(x)),
        ({}, lambda self, x: self.kept.update(x=x)),
        (set(), lambda self, x: self.kept.add(x)),
        ({"x": []}, lambda self, x: self.kept["x"].append(x)),
        (None, lambda self, x: setattr(self, "kept", (x, x))),
        (SimpleNamespace(), lambda self, x: setattr(self.kept, "loss", x)),
        (SimpleNamespace(losses=[]), lambda self, x: self.kept.losses.append(x)),
    ],
)
def test_what_keeps_what_it_computed_in_a_nest_is_one_operation_or_refused(
    attribute: Any, keep: Callable[[Any, Tensor], Any]
) -> None:
    model, before = Keeps(attribute, keep), copy.deepcopy(attribute)
    with pytest.raises(
        TracingError, match=r"py, line \d+: stores a tensor in its attribute or buffer kept, which a layer"
    ):
        gpipe.as_layers(model, torch.zeros(2, 3))
    layers = gpipe.as_layers(nn.Sequential(model, nn.Linear(3, 3)), torch.zeros(2, 3))
    assert layers.leaves == ["Keeps"] and model.kept == before
    layers(torch.ones(4, 3))
    assert model.kept != before


class Mixture(nn.Module):
    """Clears a list that its submodules share and append to, and may use up what is in it."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.kept, self.uses = list[Tensor](), uses
        self.parts = nn.ModuleList(Keeps(self.kept, lambda self, x: self.kept.append(x)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        for part in self.parts:
            x = part(x)
        while self.uses and self.kept:
            x = x + self.kept.pop()
        return x


def test_a_list_that_submodules_share_is_seen_where_it_is_used_up_and_refused_where_something_is_left() -> None:
    model, x = Mixture(uses=True), torch.randn(5, 3)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))
    with pytest.raises(TracingError, match=r"py, line \d+: stores a tensor in its attribute or buffer kept, which a"):
        gpipe.as_layers(Mixture(uses=False), x)


def test_a_tensor_that_a_submodule_of_one_operation_left_in_an_attribute_is_no_constant() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Remembers("attribute")

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) + self.part.last

    model, x = nn.Sequential(nn.Linear(3, 3), Looks()), torch.randn(5, 3)
    layers, plain = gpipe.as_layers(model, x[:2]), copy.deepcopy(model)
    assert layers.leaves == ["Looks", "Remembers"] and torch.equal(layers(x), plain(x))
    with pytest.raises(TracingError, match=r"py, line \d+: uses what a submodule that is one operation has left in an"):
        gpipe.as_layers(Looks(), x)


class Registers(nn.Module):
    """Makes a table or a weight in its first forward."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "buffer" and not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(3), persistent=False)
        if self.what == "parameter" and not hasattr(self, "table"):
            self.table = nn.Parameter(torch.ones(3))
        return x * self.table


@pytest.mark.parametrize("what", ["buffer", "parameter"])
def test_a_submodule_that_registers_a_tensor_while_it_runs_is_one_operation(what: str) -> None:
    with pytest.raises(
        TracingError, match=r"stores a tensor in its attribute or buffer table, which a layer would not"
    ):
        gpipe.as_layers(Registers(what), torch.zeros(2, 3))
    model, x = nn.Sequential(nn.Linear(3, 3), Registers(what)), torch.randn(5, 3)
    layers = gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Registers"] and not hasattr(model[1], "table")
    assert torch.equal(layers(x), model(x)) and hasattr(model[1], "table")


class Held(nn.Module):
    """Two layers, and something that it only holds."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.a, self.b, self.held = nn.Linear(4, 4), nn.Linear(4, 4), held

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Immutable(dict[str, int]):
    """A dict that lets nobody change it."""

    def clear(self) -> None:
        raise RuntimeError("immutable")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [lambda: torch.jit.script(nn.Linear(4, 4)), lambda: {"options": Immutable(size=3)}, lambda: [[1], (2, [3])]]
)
def test_what_a_model_only_holds_is_no_reason_to_refuse_it(make: Callable[[], Any]) -> None:
    model, x = Held(make()), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x)
    assert len(layers) > 1 and torch.equal(layers(x), model(x))


class Accumulates(nn.Module):
    """Changes a tensor that it is given."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total += x.mean(0)
        return x * total


def assign(_: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 4)
    out[:, :2] = x[:, :2]
    return out


@pytest.mark.parametrize(
    "fill",
    [
        assign,
        lambda _, x: torch.zeros(len(x), 4).add_(x),
        lambda _, x: operator.iadd(torch.zeros(len(x), 4), x),
        lambda _, x: operator.iadd(torch.zeros(4).view_as(x[0]), x.mean(0)) * x,
        lambda _, x: operator.iadd(torch.atleast_2d([torch.zeros(4), x])[0], x.mean(0)) * x,
        lambda self, x: self.accumulates(x, torch.zeros(4)),
        lambda _, x: x * torch.index_put_(torch.zeros(4), (x.argmax(1),), torch.ones(()), accumulate=True),
    ],
)
def test_a_tensor_that_code_makes_and_fills_is_refused(fill: Callable[[Any, Tensor], Tensor]) -> None:
    model = Running(fill)
    model.accumulates = Accumulates()
    with pytest.raises(TracingError, match=r"changes a tensor in place that it made itself; make it from another"):
        gpipe.as_layers(model, torch.randn(3, 4))


def test_a_tensor_that_code_makes_and_changes_between_uses_has_its_values_at_each_use() -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        time = torch.zeros(len(x), 1)
        for layer in (self.a, self.b):
            x = layer(x) + time
            time += 0.5
        return x * time

    model, x = Running(step), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


def test_a_tensor_that_code_makes_keeps_its_type_where_layers_are_converted() -> None:
    model, x = Running(lambda self, x: self.b(x) * torch.tensor(0.1)), torch.randn(5, 4, dtype=torch.bfloat16)
    layers = gpipe.as_layers(copy.deepcopy(model), x[:2].float()).to(torch.bfloat16)
    for one in (layers, copy.deepcopy(layers)):
        assert torch.equal(one(x), model.to(torch.bfloat16)(x))


def test_a_tensor_made_from_another_may_be_filled() -> None:
    model, x = Running(lambda _, x: operator.iadd(x.new_zeros(len(x), 4), x) * x), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    for _ in range(2):
        assert torch.equal(layers(x), model(x))


class Remembering(Parts):
    """Registers a hook and changes attributes when it runs."""

    def __init__(self, *, hooks: bool) -> None:
        super().__init__()
        self.seen, self.names, self.hooks = torch.zeros(1), list[str](), hooks

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.names.append("called")
        if self.hooks and not self.a._forward_hooks:
            self.a.register_forward_hook(lambda _, __, outputs: outputs + 1)
        return self.c(self.b(self.a(x)))


def test_a_model_has_no_hook_list_or_tensor_changed_by_being_recorded() -> None:
    model = Remembering(hooks=False)
    gpipe.as_layers(model, torch.randn(3, 4))
    assert (float(model.seen), model.names) == (0, [])
    model = Remembering(hooks=True)
    with pytest.raises(TracingError, match="registers hooks while it runs, which its layers would not have; run"):
        gpipe.as_layers(model, torch.randn(3, 4))
    assert not model.a._forward_hooks and float(model.seen) == 0
    x = torch.randn(5, 4)
    expected = model(x)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), expected)


def test_a_buffer_may_be_sparse() -> None:
    model, x = Running(lambda self, x: self.b(x)), torch.randn(5, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


class Regularized(Parts):
    """Computes with its parameters as lists of torch give them."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.to(next(self.parameters()).dtype))) * self.compute(self)


@pytest.mark.parametrize(
    "compute",
    [
        lambda self: sum(own.square().sum() for own in self.parameters()),
        lambda self: sum(own.square().sum() for name, own in self.a.named_parameters() if name == "weight"),
    ],
)
def test_parameters_in_lists_are_weights_and_no_constants(compute: Callable[[Any], Any]) -> None:
    model, x = Regularized(compute), torch.randn(5, 4)
    plain, layers = copy.deepcopy(model), gpipe.as_layers(model, x[:2])
    for one in (plain, layers):
        one(x).sum().backward()
    for own, twin in zip(model.parameters(), plain.parameters(), strict=True):
        assert (own.grad is twin.grad is None) or torch.equal(own.grad, twin.grad)


def call_with_others(self: Any, x: Tensor) -> Any:
    return torch.func.functional_call(self.b, {key: own * 2 for key, own in self.b.named_parameters()}, (x,))


def set_data(self: Any, x: Tensor) -> Tensor:
    self.b.bias.data = self.b.bias.detach() + 1
    return x


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (call_with_others, r"TypeError: Proxy\(mul\) is not an instance of torch.Tensor, for 3 examples"),
        (
            lambda self, x: self.b._parameters["bias"].exp() * x,
            r"computes with a weight reached neither by name nor by parameters\(\), which",
        ),
        (lambda self, x: self.b.bias.detach().add_(1) * x, "changes a parameter in place, of which several layers may"),
        (set_data, "sets data of a tensor, which its layers would not do"),
        (
            lambda _, x: x * (2 if x.data_ptr() else 1),
            "uses data_ptr of a tensor, which depends on how",
        ),
        (
            lambda _, x: x.register_hook(print),
            "uses register_hook of a tensor, which depends on how the model",
        ),
    ],
)
def test_code_that_reaches_past_operations_is_refused_with_its_line(
    run: Callable[[Any, Tensor], Any], said: str
) -> None:
    model = Running(run)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TracingError, match=rf"^Running cannot be cut into layers: .*test_kept_state\.py, .*: {said}"):
        gpipe.as_layers(model, torch.randn(2, 4))
    with suppress(TracingError):
        gpipe.as_layers(nn.Sequential(nn.Linear(4, 4), model), torch.randn(2, 4))
    assert all(torch.equal(own, before[key]) for key, own in model.state_dict().items())


class Running(Parts):
    """Computes as a function does."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.run(self, self.a(x)))


def descend(self: Any, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(self.b(x).square().sum(), x, create_graph=True)
    return x - gradient


@pytest.mark.parametrize("run", [call_with_others, descend])
def test_a_submodule_that_swaps_weights_or_asks_for_gradients_is_one_operation(
    run: Callable[[Any, Tensor], Any],
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Running(run), nn.Linear(4, 4)), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Running"] and torch.equal(layers(x), model(x))


class Averages(nn.Module):
    """Keeps a moving average, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> None:
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)


def double_each(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    torch._foreach_mul_([x], 2.0)
    return x


def test_what_returns_nothing_and_changes_something_is_run_too() -> None:
    model, x = Running(lambda self, x: double_each(self, x) if self.b(x) is None else x), torch.randn(5, 4)
    model.b = Averages()
    plain, layers = copy.deepcopy(model), gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Averages"] and torch.equal(layers(x), plain(x))
    assert torch.equal(model.b.average, plain.b.average) and model.b.average.any()
