"""What becomes one operation, or is refused with its line."""

from __future__ import annotations

import copy
import operator
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.tracing.errors import TracingError
from tests.tracing.models import Parts


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
    [("numbers", "decides by the values of a tensor"), ("training", r"decides by self\.training")],
)
def test_a_model_that_decides_while_it_runs_is_refused_with_the_line(where: str, said: str) -> None:
    pattern = rf"^Decides cannot be cut into layers: .*test_whole\.py, line \d+: {said}; name the submodule .*$"
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
        (lambda _, x: x * float(x.detach().mean()), "uses the value of a tensor as an integer"),
        (lambda _, x: x * x.mean().item(), r"uses the value of a tensor, as item\(\) does"),
        (
            lambda _, x: x * torch.tensor([x.detach().mean()]),
            r"takes the value out of a tensor, as torch\.tensor\(\[x\]\) does",
        ),
        (lambda _, x: x * torch.as_tensor([x.detach()[0, 0], 1.0])[0], "takes the value out of a tensor, as .* does"),
        (lambda _, x: x * 2 if x.max() > 0 else x, "decides by the values of a tensor"),
        (lambda _, x: x[x > 0].sum() * x, r"makes a tensor whose size depends on values, as x\[x > 0\] does"),
        (
            lambda _, x: x * 2 if x.requires_grad else x,
            "uses requires_grad of a tensor, which depends on how the model is run",
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
    said = f"^Catching cannot be cut into layers: {re.escape(place)}: {said}, an error that the code catches; "
    with pytest.raises(TracingError, match=said):
        gpipe.as_layers(Catching(run), torch.zeros(2, 4))
    model, x = nn.Sequential(nn.Linear(4, 4), Catching(run)), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Catching"] and torch.equal(layers(x), model(x))


def test_a_submodule_that_cannot_be_recorded_is_one_operation_though_its_caller_catches_that() -> None:
    layers = gpipe.as_layers(Catching(lambda self, x: self.inner(x) * 2), torch.zeros(2, 4))
    assert layers.leaves == ["Reversal"]


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
            "draws random numbers without using an input, .*; name the submodule in which",
        ),
        (
            lambda _, x: x + torch.randn(4),
            "draws random numbers without using an input, .*; name the submodule in which",
        ),
        (
            lambda self, x: setattr(self, "kept", x) or x,
            "stores a tensor in its attribute or buffer kept, which a layer",
        ),
        (
            lambda _, x: x + torch.arange(len(x))[:, None] % 8,
            "uses a tensor that it made itself, whose values depend on",
        ),
        (lambda _, x: torch.eye(len(x)) @ x, "uses a tensor that it made itself, whose values depend on the ex"),
        (
            lambda _, x: x * (torch.ones(len(x), 1) / len(x)),
            "uses a tensor .*, whose values depend on .* number of",
        ),
        (lambda _, x: torch.full((len(x),) * 2, 1 / len(x)) @ x, "uses a tensor .*, whose values depend on .* num"),
        (lambda _, x: x / torch.ones(len(x), len(x)).sum(1, keepdim=True), "uses a tensor .*, whose values depend on"),
        (
            lambda _, x: x * len(x) ** 2,
            r"computes with \(9, 16, 1089\) for \(3, 4, 33\) examples, which is not linear in",
        ),
        (lambda _, x: torch.from_dlpack(x), "uses __dlpack__ of a tensor, which has no data during recording; name"),
        (
            lambda _, x: torch.cat([x] * len(x)),
            "takes a list whose length depends on the number of examples; name the submodule in which",
        ),
        (
            lambda _, x: x.relu() if len(x) % 2 else x,
            "runs different operations for a different number of examples",
        ),
    ],
)
def test_what_no_layer_can_do_is_refused_with_its_line(
    run: Callable[[Any, Tensor], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place = f"{__file__}, line {run.__code__.co_firstlineno}"
    with pytest.raises(TracingError, match=f"^Failing cannot be cut into layers: {re.escape(place)}: {said}"):
        gpipe.as_layers(Failing(run), torch.zeros(2, 4))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("model", "found"), [(nn.ReLU, "the class ReLU"), (F.relu, "of type function")])
def test_what_is_no_module_is_refused(model: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"^model is {found}; give an instance of an nn.Module$"):
        gpipe.as_layers(model, torch.empty(2, 3))


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


def test_a_submodule_that_calls_a_compiled_function_is_one_operation() -> None:
    calls = []

    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        calls.append(torch.compiler.is_compiling())
        return x * 2

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x)

    model, x = Around(Doubling()), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x)
    calls.clear()
    with torch.no_grad():
        assert layers.leaves == ["Doubling"] and torch.equal(layers(x), model(x))
    assert calls and all(calls)
    with pytest.raises(
        TracingError, match=r"py, line \d+: calls a function compiled by torch\.compile, which its layers"
    ):
        gpipe.as_layers(Doubling(), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_submodule_of_torchscript_is_one_operation_with_its_weights_and_modes() -> None:
    model, x = Around(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x)
    assert len(layers) > 1 and set(map(id, layers.parameters())) == set(map(id, model.parameters()))
    for is_training in (True, False):
        assert torch.equal(layers.train(is_training)(x), model.train(is_training)(x))


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
            "leaves has '0.iner', but no submodule of Sequential has that name; .*, such as 0.inner",
        ),
        (["x"], ValueError, "leaves has 'x', but no submodule of Sequential has that name; .*, or types of submodules"),
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


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Around(Parts):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inner(self.b(self.a(x))))


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            heads = x.view(len(x), 1, 1, 4).expand(-1, -1, 3, -1)
            return F.scaled_dot_product_attention(heads, heads * 2, heads)[:, 0, 0]


class Seeded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return x + torch.rand_like(x)


def hooked() -> Around:
    model = Around(Reversal())
    model.inner.register_full_backward_hook(lambda _, gradients, __: (2 * gradients[0],))
    return model


WHOLE: dict[str, Callable[[], Parts]] = {
    "own backward": lambda: Around(Reversal()),
    "without gradient": WithoutGradient,
    "own precision": lambda: Around(Converting()),
    "own kernel": lambda: Around(Chosen()),
    "own random numbers": lambda: Around(Seeded()),
    "frozen": lambda: Around(Frozen().eval()),
    "hooked": hooked,
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_is_more_than_operations_stays_whole(kind: str, precision: torch.dtype) -> None:
    """A backward, a context, a mode or a hook of its own."""
    torch.manual_seed(0)
    model, x = WHOLE[kind](), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    layers = gpipe.as_layers(model, x[:2])
    assert len(layers) > 1 and len(layers.leaves) == (kind != "hooked")
    for one in (plain, layers):
        torch.manual_seed(1)
        with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
            outputs = one(x)
        outputs.float().square().mean().backward()
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (twin.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, twin.grad), name


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_model_with_a_backward_hook_is_refused(register: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    getattr(model, register)(lambda *_: None)
    with pytest.raises(TracingError, match=r"^Sequential has backward hooks, which layers would not call; remove them"):
        gpipe.as_layers(model, torch.randn(2, 4))


def test_a_constant_that_depends_on_the_mode_is_a_decision() -> None:
    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * torch.tensor(1.0 if self.training else 0.5))

    with pytest.raises(TracingError, match=r"decides by self.training"):
        gpipe.as_layers(Scaled(), torch.randn(3, 4))


def test_a_submodule_with_a_hook_is_one_operation_and_its_hook_is_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda _, inputs, output: seen.append(output))
    layers = gpipe.as_layers(model, torch.zeros(2, 4))
    seen.clear()
    layers(torch.ones(2, 4))
    assert len(seen) == 1 and type(seen[0]) is Tensor


def test_hooks_may_change_what_a_submodule_takes_and_returns() -> None:
    model, x = nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 3)), torch.randn(5, 6)
    model[0].register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :4],))
    model[0].register_forward_hook(lambda _, __, outputs: outputs[0])
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))
