"""What a model's code asks torch and Python for is seen, stays whole, or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe._compat.torch_description import list_device_constructors
from gpipe.tracing.errors import TracingError
from tests.tracing.models import Parts


class Noise(nn.Module):
    """Draws numbers that no tensor enters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3)


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
        match=r"test_recording\.py, line \d+: draws random numbers without using an input, which would be the same in "
        r"every forward; use one, as torch\.rand_like\(x\) does; name the",
    ):
        gpipe.as_layers(Noise(), torch.zeros(2, 3))


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
    said = (
        rf"^Asks cannot be cut into layers: .*test_recording\.py, line \d+: calls torch\.{query[0]}, which depends on"
    )
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

    class Places(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.device("cpu"):
                return super().forward(x) + torch.zeros(4)

    list_device_constructors.cache_clear()  # as in a process that has used none
    gpipe.as_layers(Places(4, 4), torch.ones(2, 4))
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta and torch.as_tensor([1.0]).is_meta


def test_numbers_become_tensors_by_any_name_of_the_argument() -> None:
    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * torch.asarray(obj=[1.0, 2.0, 3.0, 4.0]) + torch.tensor(data=1.0)

    model, x = Scaled(), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, x)(x), model(x))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x / np.sqrt(4),
        lambda x: np.sqrt(4) * x,
        lambda x: x * np.float32(0.1),
        lambda x: x.view(-1, np.prod((2, 2))),
    ],
)
def test_numbers_of_numpy_are_numbers(compute: Callable[[Tensor], Tensor]) -> None:
    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(compute(self.a(x)))

    model, x = Scaled(), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


def test_a_shift_in_place_changes_the_tensor_under_its_other_names() -> None:
    class Shifts(Parts):
        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            other = count.clone()
            alias = other
            alias <<= 1
            return self.b(self.a(x)) * other

    model, inputs = Shifts(), (torch.randn(5, 4), torch.ones(5, 1, dtype=torch.long))
    assert torch.equal(gpipe.as_layers(model, inputs)(inputs), model(*inputs))


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


class Criticized(Parts):
    """Makes modules while it runs, as the models of transformers make their losses."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.b(nn.Dropout(0.5)(self.a(x)))
        return nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0))(self.c(nn.ReLU()(hidden)), labels)


def test_a_module_that_the_models_code_makes_is_recorded_in_its_own_mode() -> None:
    model, inputs = Criticized(), (torch.randn(5, 4), torch.arange(5) % 4)
    layers = gpipe.as_layers(model, inputs)
    for one in (layers, layers.eval()):
        torch.manual_seed(0)
        found = one(inputs)
        torch.manual_seed(0)
        assert len(layers) > 1 and torch.equal(found, model(*inputs))  # it makes a dropout in training mode


def test_a_module_with_weights_outside_the_model_is_refused_or_in_one_operation() -> None:
    class Taught(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [nn.Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) - self.teacher[0](x).detach()

    with pytest.raises(TracingError, match=r"py, line \d+: runs a module of type Linear with weights that is not"):
        gpipe.as_layers(Taught(), torch.randn(2, 4))
    model, x = nn.Sequential(Taught(), nn.Linear(4, 4)), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert layers.leaves == ["Taught"] and torch.equal(layers(x), model(x))
