"""What a model's code does beside operations: it stays whole, is refused, or is seen."""

from __future__ import annotations

import copy
import operator
import random
import re
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.tracing.errors import TracingError
from tests.tracing.models import build, images


class Decides(nn.Module):
    """Is not the same operations for all inputs."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = Inner(), where

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.where == "numbers" and x.sum() > 0:
            return x + 1
        if self.where == "training" and self.training:
            return x + 2
        return x


class Inner(nn.Module):
    """Decides too, and can be one operation."""

    def __init__(self, is_training: Callable[[nn.Module], bool] = operator.attrgetter("training")) -> None:
        super().__init__()
        self.linear, self.is_training = nn.Linear(3, 3), is_training

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if self.is_training(self) else 2)


@pytest.mark.parametrize(
    ("where", "said"),
    [("numbers", "decides by the numbers of a tensor"), ("training", r"decides by self\.training")],
)
def test_a_model_that_decides_while_it_runs_is_refused_with_the_line(where: str, said: str) -> None:
    pattern = rf"^Decides cannot be cut into layers: .*test_recording\.py, line \d+: {said}; name the submodule .*$"
    with pytest.raises(TracingError, match=pattern) as error:
        gpipe.as_layers(Decides(where), torch.zeros(2, 3))
    line = int(str(error.value).partition(", line ")[2].partition(":")[0])
    assert f'self.where == "{where}"' in Path(__file__).read_text().splitlines()[line - 1]


def test_a_model_of_torch_that_decides_is_refused_with_torchs_line() -> None:
    with pytest.raises(TracingError, match=r"torch/nn/modules/transformer\.py, line \d+: decides by self\.training"):
        gpipe.as_layers(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 3, 8))


@pytest.mark.parametrize(
    "is_training",
    [
        operator.attrgetter("training"),
        lambda module: operator.eq(module.training, True),
        lambda module: operator.ne(module.training, False),
    ],
)
def test_a_submodule_that_decides_is_one_operation_of_itself(is_training: Callable[[nn.Module], bool]) -> None:
    model, x = Decides("nowhere"), torch.randn(4, 3)
    model.inner = Inner(is_training)
    layers = gpipe.as_layers(nn.Sequential(model, nn.Linear(3, 3)), torch.zeros(2, 3))
    assert layers.leaves == ["Inner"]
    layers.train()
    before = layers(x)
    assert not torch.equal(layers.eval()(x), before)


class Noise(nn.Module):
    """Draws numbers that no tensor enters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3)


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
        match=rf"test_recording\.py, line \d+: puts a tensor into its attribute or buffer {name}, which a layer",
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
    ],
)
def test_what_keeps_what_it_computed_in_a_nest_is_one_operation_or_refused(
    attribute: Any, keep: Callable[[Any, Tensor], Any]
) -> None:
    model, before = Keeps(attribute, keep), copy.deepcopy(attribute)
    with pytest.raises(
        TracingError, match=r"py, line \d+: puts a tensor into its attribute or buffer kept, which a layer"
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
    with pytest.raises(TracingError, match=r"py, line \d+: puts a tensor into its attribute or buffer kept, which a"):
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


class Parts(nn.Module):
    """Three linear layers, for the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))


class Negated(torch.autograd.Function):
    """Reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Reversal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Negated.apply(x)  # type: ignore[no-any-return]


class Catching(Parts):
    """Does something else where it fails."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.run = Reversal(), run

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        try:
            y = self.run(self, y)
        except:  # noqa: E722 - as models do
            return self.b(y)
        return self.c(y)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda _, x: x * float(x.detach().mean()), "uses the number of a tensor as an integer"),
        (lambda _, x: x * x.mean().item(), "DataDependentOutputException: .*"),
        (lambda _, x: x * 2 if x.max() > 0 else x, "decides by the numbers of a tensor"),
        (lambda _, x: x[x > 0].sum() * x, "DynamicOutputShapeException: .*"),
        (
            lambda _, x: x * 2 if x.requires_grad else x,
            "asks for requires_grad of a tensor, which depends on who runs it",
        ),
        (
            lambda _, x: Negated.apply(x),
            r"calls Negated\.apply, whose own backward would be lost; call it in a submodule",
        ),
    ],
)
def test_code_that_catches_a_refusal_is_refused_with_its_line_or_one_operation(
    run: Callable[[Any, Tensor], Any], said: str
) -> None:
    place = f"{__file__}, line {run.__code__.co_firstlineno}"
    with pytest.raises(TracingError, match=f"^Catching cannot be cut into layers: {re.escape(place)}: {said}; "):
        gpipe.as_layers(Catching(run), torch.zeros(2, 4))
    model, x = nn.Sequential(nn.Linear(4, 4), Catching(run)), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Catching"] and torch.equal(layers(x), model(x))


def test_a_submodule_that_cannot_be_recorded_is_one_operation_though_its_caller_catches_that() -> None:
    layers = gpipe.as_layers(Catching(lambda self, x: self.inner(x) * 2), torch.zeros(2, 4))
    assert layers.leaves == ["Reversal"]


class Outer(nn.Module):
    """Has a submodule called as the tracer calls the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = Noise(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.other(self.model(x)))


def test_random_numbers_that_no_input_enters_are_drawn_anew_each_time() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model = Outer()
    layers = gpipe.as_layers(model, torch.zeros(2, 3))
    assert layers.leaves == ["Noise"]
    x = torch.zeros(4, 3)
    for _ in range(2):
        torch.set_rng_state(state)
        assert torch.equal(layers(x), model(x)) is False
        torch.set_rng_state(state)
        expected = model(x)
        torch.set_rng_state(state)
        assert torch.equal(layers(x), expected)
    with pytest.raises(
        TracingError,
        match=r"test_recording\.py, line \d+: draws random numbers that no input enters, which would be the sam",
    ):
        gpipe.as_layers(Noise(), torch.zeros(2, 3))


class Failing(nn.Module):
    """Fails, or does what no layer can do, in a function that it is given."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(4, 4), nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.run(self, x)
        return x.tanh()


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            lambda self, x: self.b(x),
            "RuntimeError: .*shapes cannot be multiplied .*; check the shapes and types of the",
        ),
        (
            lambda _, x: x + random.random(),
            "draws random numbers that no input enters, .*; name the submodule in which",
        ),
        (lambda _, x: x + torch.randn(4), "draws random numbers that no input enters, .*; name the submodule in which"),
        (
            lambda self, x: setattr(self, "kept", x) or x,
            "puts a tensor into its attribute or buffer kept, which a layer",
        ),
        (
            lambda _, x: x + torch.arange(len(x))[:, None] % 8,
            "uses a tensor that it made itself, with other values for",
        ),
        (lambda _, x: torch.eye(len(x)) @ x, "uses a tensor that it made itself, with other values for each"),
        (
            lambda _, x: x * (torch.ones(len(x), 1) / len(x)),
            "uses a tensor .*, with other values for each .* number of",
        ),
        (lambda _, x: torch.full((len(x),) * 2, 1 / len(x)) @ x, "uses a tensor .*, with other values for each .* num"),
        (lambda _, x: x / torch.ones(len(x), len(x)).sum(1, keepdim=True), "uses a tensor .*, with other values for"),
        (
            lambda _, x: x * len(x) ** 2,
            r"computes with \(9, 16, 1089\) for \(3, 4, 33\) examples, which does not follow",
        ),
        (lambda _, x: torch.from_dlpack(x), "asks for __dlpack__ of a tensor, which is not there yet; name"),
        (
            lambda _, x: torch.cat([x] * len(x)),
            "takes as many parts as there are examples; name the submodule in which",
        ),
        (lambda _, x: x.relu() if len(x) % 2 else x, "runs other operations for another number of examples; name"),
    ],
)
def test_what_no_layer_can_do_is_refused_with_its_line(
    run: Callable[[Any, Tensor], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place = f"{__file__}, line {run.__code__.co_firstlineno}"
    with pytest.raises(TracingError, match=f"^Failing cannot be cut into layers: {re.escape(place)}: {said}"):
        gpipe.as_layers(Failing(run), torch.zeros(2, 4))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("part", "said"), [(np.zeros(3), "a value of type ndarray"), (2, "2"), ("a", "'a'")])
def test_an_example_of_something_else_than_tensors_is_refused_whole(part: Any, said: str) -> None:
    message = (
        f"the example has {said}, and layers take tensors and None; give torch.as_tensor of an array, and make a "
        "number or a name a part of the model"
    )
    with pytest.raises(TracingError, match=f"^{message}$"):
        gpipe.as_layers(nn.Linear(3, 3), (torch.zeros(2, 3), part))


def test_a_compiled_model_is_refused_and_a_compiled_submodule_is_one_operation() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    plain, x = copy.deepcopy(model), torch.randn(5, 4)
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    for compiled in (torch.compile(copy.deepcopy(model), backend="eager"), in_place):
        with pytest.raises(
            TracingError, match=r"is compiled by torch\.compile, .*; give .* and call pipeline\.compile"
        ):
            gpipe.as_layers(compiled, x)
    model[0] = torch.compile(model[0], backend="eager")
    model[2].compile(backend="eager")
    layers = gpipe.as_layers(model, x[:2])
    assert torch.equal(layers(x), plain(x)) and len(layers) > 1
    kinds = [type(module).__name__ for module in layers.modules()]
    assert kinds.count("OptimizedModule") == 1


@pytest.mark.parametrize("leaf", ["0", Decides])
def test_a_named_submodule_or_type_is_one_operation(leaf: Any) -> None:
    model = nn.Sequential(Decides("numbers"), nn.Linear(3, 3))
    layers = gpipe.as_layers(model, torch.zeros(2, 3), leaves=[leaf])
    x = torch.randn(4, 3)
    assert torch.equal(layers(x), model(x))


@pytest.mark.parametrize(
    ("leaves", "kind", "said"),
    [
        ("0", TypeError, r"leaves is '0'; give a list of names and types, such as \['0'\]"),
        (Decides, TypeError, r"leaves is .*; give a list of names and types, such as \[Decides\]"),
        ([nn.Tanh()], TypeError, "leaves has an entry of type Tanh; give names and types of submodules"),
        (
            ["0.iner"],
            ValueError,
            "leaves has '0.iner', but no submodule of Sequential is called so; .*, such as 0.inner",
        ),
        (["x"], ValueError, "leaves has 'x', but no submodule of Sequential is called so; .*, or types of submodules"),
        (
            [nn.LSTM],
            ValueError,
            "leaves has LSTM, but no submodule of Sequential is of that type; .* types of submodules",
        ),
    ],
)
def test_leaves_that_are_no_submodules_are_refused(leaves: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=f"^{said}$"):
        gpipe.as_layers(nn.Sequential(Decides("nowhere"), nn.Linear(3, 3)), torch.zeros(2, 3), leaves=leaves)


@pytest.mark.parametrize("is_counted_first", [False, True])
def test_no_cut_lies_where_the_number_of_examples_is_lost_and_needed(*, is_counted_first: bool) -> None:
    class Pooling(Parts):
        def forward(self, x: Tensor) -> Tensor:
            mean = self.b(self.a(x).mean(0)).masked_fill(torch.arange(4) > 2, float("nan"))
            if is_counted_first:
                return self.c(mean.expand(len(x), -1)).nan_to_num()
            return self.c(self.b(mean.nan_to_num())) * torch.ones(len(x), 1)

    model, x = Pooling(), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert len(layers) > 1 and torch.equal(layers(x), model(x))


def test_a_tensor_as_long_as_the_batch_may_have_one_value_for_any_number_of_examples() -> None:
    class Halved(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * torch.full((len(x), 1), 0.5))

    model, x = Halved(), torch.randn(12, 4)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


def test_numbers_that_follow_the_batch_in_another_way_are_refused() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (len(x) ** 2)

    with pytest.raises(
        TracingError, match=r"py, line \d+: computes with \(9, 16, 1089\) for \(3, 4, 33\) examples, which does"
    ):
        gpipe.as_layers(Square(), torch.zeros(2, 3))


class Masked(nn.Module):
    """Attends under a mask that belongs to no example, along the first dimension; the examples are the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x.reshape(len(mask), x.shape[1], 8)


def test_a_mask_of_no_example_reaches_every_layer_of_every_micro_batch() -> None:
    torch.manual_seed(0)
    model, x, targets = Masked(), torch.randn(5, 6, 8), torch.randn(5, 6, 8)
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    plain = copy.deepcopy(model)
    layers = gpipe.as_layers(model, (gpipe.split_along(x, 1), gpipe.replicated(mask)))
    assert len(layers) > 2
    pipeline = gpipe.Pipeline(layers, F.mse_loss, gpipe.partition_layers([1] * len(layers), 2), 3, output_dimension=1)
    report = pipeline.train_step(((gpipe.split_along(x, 1), gpipe.replicated(mask)), gpipe.split_along(targets, 1)))
    for part, aims in zip(x.split(2, dim=1), targets.split(2, dim=1), strict=True):
        (F.mse_loss(plain(part, mask), aims) / 3).backward()
    assert torch.allclose(torch.as_tensor(report.loss), F.mse_loss(plain(x, mask), targets))
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, twin.grad, atol=1e-7), name


class Nested(nn.Module):
    """Returns its output as a function nests it."""

    def __init__(self, nest: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.nest = nest

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.nest(x)


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: {"a": {"b": x}},
        lambda x: [x],
        lambda x: (x, [x + 1, {"a": (x[:, :2], None)}]),
        lambda x: OrderedDict(out=x, none=None),
    ],
)
def test_outputs_are_nested_as_the_models_are(nest: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Nested(nest), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:3])
    found = gpipe.Pipeline(layers, lambda outputs, _: outputs, [len(layers)], 2).evaluate(x)
    assert len(layers) > 1
    assert_nested_alike(found, model(x))


def assert_nested_alike(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.allclose(found, expected, atol=1e-6)
        return
    assert type(found) is (dict if isinstance(expected, dict) else type(expected))
    if expected is not None:
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_nested_alike(found[key], expected[key])


def test_the_example_may_be_on_another_device_than_the_model() -> None:
    layers = gpipe.as_layers(build("ViT").to("meta"), images())
    other = gpipe.as_layers(build("ViT").to("meta"), images().to("meta"))
    assert [str(layer) for layer in layers] == [str(layer) for layer in other] and len(layers) > 1
    assert {parameter.device.type for parameter in layers.parameters()} == {"meta"}


class OwnBackward(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.reversal = Reversal()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.reversal(self.b(self.a(x))))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(x).sigmoid()


class WithoutGradient(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * self.gate(x))


class Converting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x.float() @ torch.ones(4, 4)


class OwnPrecision(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.converting = Converting()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.converting(self.b(self.a(x))))


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class FrozenPart(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = Frozen().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.frozen(self.b(self.a(x))))


class Hooked(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Reversal()
        self.inner.register_full_backward_hook(lambda _, gradients, __: (2 * gradients[0],))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inner(self.b(self.a(x))))


@pytest.mark.parametrize("kind", [OwnBackward, WithoutGradient, OwnPrecision, FrozenPart, Hooked])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_is_more_than_operations_stays_whole(kind: type[Parts], precision: torch.dtype) -> None:
    """A backward, a context, a mode or a hook of its own."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    layers = gpipe.as_layers(model, x[:2])
    assert len(layers) > 1 and len(layers.leaves) == (kind is not Hooked)
    for one in (plain, layers):
        torch.manual_seed(1)
        with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
            outputs = one(x)
        outputs.float().square().mean().backward()
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (twin.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, twin.grad), name


class Asks(nn.Module):
    """Doubles what it returns in a context of torch."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__()
        self.linear, self.name, self.args = nn.Linear(4, 4), name, args

    def forward(self, x: Tensor) -> Tensor:
        found = getattr(torch, self.name)(*self.args)
        return self.linear(x) * (2 if found in (True, torch.float16) else 1)


QUERIES = [
    ("is_grad_enabled",),
    ("is_inference_mode_enabled",),
    ("is_autocast_enabled", "cpu"),
    ("is_autocast_cache_enabled",),
    ("get_autocast_dtype", "cpu"),
]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[0])
def test_a_submodule_that_asks_for_a_context_of_torch_is_one_operation(query: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Asks(*query), nn.Linear(4, 4)), torch.randn(6, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Asks"]
    contexts = torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.float16, cache_enabled=False)
    for context in contexts:
        with context:
            assert torch.equal(layers(x), model(x))


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query[0])
def test_a_model_that_asks_for_a_context_of_torch_is_refused_with_the_line(query: tuple[str, ...]) -> None:
    function = getattr(torch, query[0])
    said = rf"^Asks cannot be cut into layers: .*test_recording\.py, line \d+: asks torch\.{query[0]}, which depends on"
    with pytest.raises(TracingError, match=said):
        gpipe.as_layers(Asks(*query), torch.zeros(2, 4))
    assert getattr(torch, query[0]) is function


class Choosing(Parts):
    """Looks at what a recurrent layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, hidden = self.rnn(self.a(x))
        if isinstance(hidden, tuple):
            hidden = hidden[0]
        found = self.b(hidden[-1])
        return self.c(found) if isinstance(found, Tensor) and torch.is_tensor(found) else found[-1]


def test_isinstance_sees_what_is_traced() -> None:
    torch.manual_seed(0)
    model, x = Choosing(), torch.randn(5, 3, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert torch.equal(layers(x), model(x))
    assert isinstance is __builtins__["isinstance"] and not isinstance(x, tuple)  # type: ignore[index]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}])
def test_a_conversion_by_torch_is_an_operation(options: dict[str, Any]) -> None:
    class Converts(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.as_tensor(self.a(x), **options).float())

    model, x = Converts(), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert len(layers) > 1 and torch.equal(layers(x), model(x))


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


@pytest.mark.parametrize("name", ["__array__", "__dlpack__", "__complex__"])
def test_code_that_asks_for_the_memory_of_a_tensor_is_one_operation(name: str) -> None:
    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2 if hasattr(x, name) else 3)

    model, x = nn.Sequential(nn.Linear(4, 4), Asking(), nn.Linear(4, 4)), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x)
    assert layers.leaves == ["Asking"] and torch.equal(layers(x), model(x))


def test_torch_knows_its_own_constructors_of_tensors_afterwards() -> None:
    """It looks for them once, at the first use of a default device, which may be in a model's code."""
    program = (
        "import torch, gpipe\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        with torch.device('cpu'):\n"
        "            return super().forward(x) + torch.zeros(4)\n"
        "gpipe.as_layers(Model(4, 4), torch.ones(2, 4))\n"
        "torch.set_default_device('meta')\n"
        "print(torch.tensor([1.0]).device, torch.as_tensor([1.0]).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta", "meta"]


def test_numbers_become_tensors_by_any_name_of_the_argument() -> None:
    class Scaled(Held):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.asarray(obj=[1.0, 2.0, 3.0, 4.0]) + torch.tensor(data=1.0)

    model, x = Scaled(None), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, x)(x), model(x))


def test_a_shift_in_place_changes_the_tensor_under_its_other_names() -> None:
    class Shifts(Parts):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            other = count.clone()
            alias = other
            alias <<= 1
            return self.b(self.a(x)) * other

    model, inputs = Shifts(), (torch.randn(5, 4), torch.ones(5, 1, dtype=torch.long))
    assert torch.equal(gpipe.as_layers(model, inputs)(inputs), model(*inputs))


class Filling(Parts):
    """Fills a tensor that it makes, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 4) if self.how == "of another" else torch.zeros(len(x), 4)
        y = self.a(x)
        if self.how == "assigned":
            out[:, :2] = y[:, :2]
        elif self.how == "method":
            out.add_(y)
        else:
            for layer in (self.a, self.b):
                out += layer(x)
        return self.c(y) + out


@pytest.mark.parametrize("how", ["assigned", "method", "added to"])
def test_a_tensor_that_code_makes_and_fills_is_refused(how: str) -> None:
    with pytest.raises(TracingError, match=r"changes a tensor in place that it made itself; make it from another"):
        gpipe.as_layers(Filling(how), torch.randn(3, 4))


class Accumulates(nn.Module):
    """Changes a tensor that it is given."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total += x.mean(0)
        return x * total


class Fills(nn.Module):
    """Makes a tensor, which a submodule or a function changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.accumulates = how, nn.Linear(4, 4), Accumulates()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.how == "submodule":
            return self.accumulates(y, torch.zeros(4))
        places = (y.argmax(1),)
        return y * torch.index_put_(torch.zeros(4), places, torch.ones(()), accumulate=True)


@pytest.mark.parametrize("how", ["submodule", "function"])
def test_a_tensor_that_code_makes_and_lets_another_fill_is_refused(how: str) -> None:
    with pytest.raises(TracingError, match=r"changes a tensor in place that it made itself; make it from another"):
        gpipe.as_layers(Fills(how), torch.randn(3, 4))


class OddNames(nn.Module):
    """Has buffers of names that layers give to what they add, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        for number, name in enumerate(("constant_0", "unused_0", "other")):
            self.register_buffer(name, torch.full((3,), 2.0 + number))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * torch.tensor([1.0, 2.0, 3.0]) + self.constant_0

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def test_names_of_a_model_are_its_own_whatever_layers_add() -> None:
    model, x = OddNames(), torch.randn(5, 3)
    layers = gpipe.as_layers(model, x[:2])
    assert torch.equal(layers(x), model(x))
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = layers.model_state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_model_with_a_backward_hook_is_refused(register: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    getattr(model, register)(lambda *_: None)
    with pytest.raises(TracingError, match=r"^Sequential has backward hooks, which layers would not call; remove them"):
        gpipe.as_layers(model, torch.randn(2, 4))


def test_a_tensor_made_from_another_may_be_filled() -> None:
    model, x = Filling("of another"), torch.randn(5, 4)
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


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1 if len(x) % 2 else x,
        lambda x: x * (2 if len(x) > 16 else 1),
    ],
)
def test_code_that_treats_even_or_many_examples_otherwise_is_refused(compute: Callable[[Tensor], Tensor]) -> None:
    class Treating(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(compute(self.a(x)))

    with pytest.raises(TracingError, match=r"for another number of examples|which does not follow their number"):
        gpipe.as_layers(Treating(), torch.randn(3, 4))


def test_a_part_of_an_example_is_a_tensor_or_none() -> None:
    class Optional(Parts):
        def forward(self, x: Tensor, more: Tensor | None) -> Tensor:
            return self.b(self.a(x) if more is None else more)

    model, x = Optional(), torch.randn(5, 4)
    layers = gpipe.as_layers(model, (x[:2], None))
    assert torch.equal(layers((x, None)), model(x, None))
    with pytest.raises(TracingError, match=r"the example has 3.0, and layers take tensors and None"):
        gpipe.as_layers(model, (x, 3.0))


def test_a_constant_that_depends_on_the_mode_is_a_decision() -> None:
    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * torch.tensor(1.0 if self.training else 0.5))

    with pytest.raises(TracingError, match=r"decides by self.training"):
        gpipe.as_layers(Scaled(), torch.randn(3, 4))


class Skips(nn.Module):
    """Leaves a layer out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x if random.random() < 0.1 else x + block(x)
        return x


@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_asks_pythons_generator_is_refused_whatever_it_says(seed: int) -> None:
    random.seed(seed)
    before = random.getstate()
    with pytest.raises(TracingError):
        gpipe.as_layers(Skips(), torch.zeros(2, 3))
    assert random.getstate() == before


def test_a_submodule_that_asks_pythons_generator_is_one_operation_and_asks_each_time() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Skips(), nn.Linear(3, 3))
    layers = gpipe.as_layers(model, torch.zeros(2, 3))
    assert layers.leaves == ["Skips"]
    x = torch.ones(2, 3)
    for seed in range(9):
        random.seed(seed)
        found = layers(x)
        random.seed(seed)
        assert torch.equal(found, model(x))


def test_a_submodule_with_a_hook_is_one_operation_and_its_hook_is_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda _, inputs, output: seen.append(output))
    layers = gpipe.as_layers(model, torch.zeros(2, 4))
    seen.clear()
    layers(torch.ones(2, 4))
    assert len(seen) == 1 and type(seen[0]) is Tensor
