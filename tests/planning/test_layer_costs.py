"""The public views of a layer's description, beside arithmetic on paper."""

import copy
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.pipeline.microbatch import replicated, split_along
from gpipe.planning.profile import LayerCost, analyze_layers, profile_layers
from gpipe.planning.timing import measure_layers

Analysis = Callable[[nn.Sequential, Any], list[LayerCost]]
both = pytest.mark.parametrize("analysis", [analyze_layers, measure_layers])


class Pair(nn.Module):
    """Return the linear image and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"state": (self.linear(x), x), "again": x, "nothing": None}


class Join(nn.Module):
    def forward(self, payload: dict[str, Any]) -> Tensor:
        state, previous_state = payload["state"]
        return torch.cat([state, previous_state], dim=1)


class Noisy(nn.Module):
    """Draw from the global generator, and change the input and a buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        return functional.dropout(x.mul_(2), 0.5)


class Peek(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_linear_layer_costs_what_paper_and_pencil_say() -> None:
    (cost,) = analyze_layers(nn.Sequential(nn.Linear(5, 3)), torch.empty(2, 5))
    assert cost == LayerCost(
        flops=2 * 2 * 5 * 3,
        parameters=5 * 3 + 3,
        parameter_bytes=4 * (5 * 3 + 3),
        output_bytes=4 * 2 * 3,
        seconds=None,
    )


def test_a_grouped_convolution_in_half_precision_costs_what_paper_and_pencil_say() -> None:
    convolution = nn.Conv2d(4, 6, kernel_size=3, stride=2, groups=2, bias=False, dtype=torch.bfloat16)
    (cost,) = analyze_layers(nn.Sequential(convolution), torch.empty(2, 4, 9, 9, dtype=torch.bfloat16))
    assert cost.flops == 2 * (2 * 6 * 4 * 4) * (2 * 3 * 3)
    assert (cost.parameters, cost.parameter_bytes) == (6 * 2 * 3 * 3, 2 * 6 * 2 * 3 * 3)
    assert cost.output_bytes == 2 * (2 * 6 * 4 * 4)


def test_attention_counts_its_two_products() -> None:
    class SelfAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    (cost,) = analyze_layers(nn.Sequential(SelfAttention()), torch.empty(2, 3, 5, 8, requires_grad=True))
    assert cost.flops == 2 * 2 * (2 * 3 * 5 * 5 * 8)


def test_a_nested_payload_is_followed_and_a_tensor_in_it_twice_counts_once() -> None:
    first, second = analyze_layers(nn.Sequential(Pair(), Join()), torch.empty(2, 3))
    assert first.output_bytes == 4 * 2 * (4 + 3)
    assert second.output_bytes == 4 * 2 * 7


class Masked(nn.Module):
    """Attends with a mask and positions that it makes in each forward, or made before."""

    def __init__(self, makes: Callable[[int], tuple[Tensor, Tensor]] | None) -> None:
        super().__init__()
        self.makes, self.linear = makes, nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(3, 3))
        self.register_buffer("positions", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        mask, positions = (self.mask, self.positions) if self.makes is None else self.makes(x.shape[1])
        attended: Tensor = (x @ x.transpose(1, 2) + mask).softmax(-1) @ self.linear(x + positions)
        return attended


@pytest.mark.parametrize(
    "makes",
    [
        lambda length: (torch.ones(length, length).tril().log(), torch.arange(length)[:, None] * torch.tensor(0.5)),
        lambda length: (torch.full((length, length), -1.0).triu(1), torch.linspace(0, 1, length)[:, None]),
        lambda length: (torch.eye(length), torch.randn(length, 4)),
    ],
)
def test_a_layer_that_makes_tensors_of_its_own_costs_what_one_that_keeps_them_does(
    makes: Callable[[int], tuple[Tensor, Tensor]],
) -> None:
    found, expected = (analyze_layers(nn.Sequential(Masked(how)), torch.zeros(2, 3, 4)) for how in (makes, None))
    assert found == expected
    assert found[0].flops > 2 * 2 * 3 * 4 * 4


class Holder:
    """No module, so torch does not know of the tensor in it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Keeps(nn.Module):
    """Keeps tensors that are neither parameters nor buffers, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nest, self.holder = torch.ones(4), {"bias": [torch.zeros(4)]}, Holder(torch.eye(4))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(4, generator=self.generator)
        return (x * self.scale + self.nest["bias"][0] + noise) @ self.holder.tensor


@both
def test_a_layer_that_keeps_tensors_outside_of_its_buffers_is_described(analysis: Analysis) -> None:
    keeps = Keeps()
    linear, cost = analysis(nn.Sequential(nn.Linear(4, 4, bias=False), keeps), torch.zeros(3, 4))
    assert (cost.flops, cost.parameters, cost.output_bytes) == (linear.flops, 0, linear.output_bytes)
    assert torch.equal(keeps.holder.tensor, torch.eye(4))


def test_a_layer_that_cannot_be_copied_is_named_with_the_remedy() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    layers[1].lock = threading.Lock()
    with pytest.raises(
        ValueError, match=r"^Layer 1 \(ReLU\) cannot be copied \(TypeError: .*\); give it a __deepcopy__"
    ):
        analyze_layers(layers, torch.zeros(3, 2))


def test_integer_inputs_are_described() -> None:
    (cost,) = analyze_layers(nn.Sequential(nn.Embedding(10, 4)), torch.zeros(2, 3, dtype=torch.int64))
    assert (cost.flops, cost.output_bytes) == (0, 4 * 2 * 3 * 4)


@both
def test_an_example_with_marks_costs_what_its_tensors_cost(analysis: Analysis) -> None:
    layers, x = nn.Sequential(nn.Linear(3, 4)), torch.ones(5, 2, 3)
    expected = [replace(cost, seconds=None) for cost in analysis(layers, x)]
    for marked in (split_along(x, 1), replicated(x)):
        assert [replace(cost, seconds=None) for cost in analysis(layers, marked)] == expected


@both
def test_layers_example_and_generators_stay_as_they_were(analysis: Analysis) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Noisy(), nn.Dropout()).eval()
    layers[0].weight.grad = torch.ones(4, 4)
    example = torch.rand(3, 4)
    before = copy.deepcopy((layers.state_dict(), example))
    states = torch.get_rng_state(), random.getstate()
    analysis(layers, example)
    analysis(nn.Sequential(Noisy()), example)
    for name, tensor in layers.state_dict().items():
        assert torch.equal(tensor, before[0][name]), name
    assert torch.equal(example, before[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not any(module.training for module in layers.modules())
    assert torch.equal(layers[0].weight.grad, torch.ones(4, 4))


def test_a_model_on_the_meta_device_is_described_as_the_real_one() -> None:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    real = analyze_layers(layers, torch.rand(2, 2, 5, 5))
    assert analyze_layers(layers.to("meta"), torch.rand(2, 2, 5, 5, device="meta")) == real


def test_no_gradient_mode_of_the_caller_changes_nothing() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad():
        inside = analyze_layers(layers, torch.rand(2, 4))
    assert inside == analyze_layers(layers, torch.rand(2, 4))


def test_measuring_adds_the_seconds_of_each_layer_to_its_description() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    described, measured = analyze_layers(layers, torch.rand(2, 4)), measure_layers(layers, torch.rand(2, 4), repeats=1)
    for one, other in zip(described, measured, strict=True):
        assert other.seconds is not None
        assert other.seconds > 0
        assert other == LayerCost(**{**vars(one), "seconds": other.seconds})


def test_a_layer_that_looks_at_values_is_named() -> None:
    message = (
        r"^Layer 1 \(Peek\) cannot be described without data \(.*\); check the .* measure_layers, .* your own costs\.$"
    )
    with pytest.raises(ValueError, match=message):
        analyze_layers(nn.Sequential(nn.ReLU(), Peek()), torch.rand(2, 4))


@both
def test_a_module_that_is_no_sequence_is_refused(analysis: Analysis) -> None:
    with pytest.raises(
        TypeError, match=r"^layers is of type Linear; it must be an nn\.Sequential .*, which gpipe\.as_"
    ):
        analysis(nn.Linear(3, 3), torch.zeros(2, 3))  # type: ignore[arg-type]


def test_layers_of_which_one_looks_at_values_are_measured_with_the_costs_of_those_that_do_not() -> None:
    def build(looking: nn.Module) -> nn.Sequential:
        tied = nn.Linear(4, 4)
        layers = nn.Sequential(tied, nn.Dropout(), looking, nn.BatchNorm1d(4), nn.Linear(4, 4))
        layers[4].weight = tied.weight
        return layers

    example, layers = torch.rand(3, 4), build(Peek())
    described = analyze_layers(build(nn.Identity()), example)
    before, state = copy.deepcopy(layers.state_dict()), torch.get_rng_state()
    measured = measure_layers(layers, example, repeats=1)
    assert [replace(cost, seconds=None) for cost in measured] == described
    assert all(cost.seconds is not None for cost in measured)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layers.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_measuring_a_shape_that_does_not_fit_names_the_layer() -> None:
    with pytest.raises(ValueError, match=r"^Layer 1 \(Linear\) cannot be described .*; check the example's shape, or"):
        measure_layers(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), torch.rand(2, 4))


def test_a_shape_that_does_not_fit_names_the_layer() -> None:
    with pytest.raises(
        ValueError, match=r"^Layer 1 \(Linear\) cannot be described without data \(RuntimeError: .*\); "
    ):
        analyze_layers(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), torch.rand(2, 4))


def test_the_meta_device_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match=r"^The layers or the example are on the meta device; move both to a real one"):
        measure_layers(nn.Sequential(nn.Linear(4, 4, device="meta")), torch.rand(2, 4))


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta or type(x) is not Tensor else x.reshape(7)


def test_a_layer_that_fails_while_it_is_timed_is_named() -> None:
    message = (
        r"^Layer 1 \(Odd\) cannot be timed on the example \(RuntimeError: .*\); put the layers and the example on one"
    )
    with pytest.raises(ValueError, match=message):
        measure_layers(nn.Sequential(nn.ReLU(), Odd()), torch.rand(2, 4), repeats=1)


def test_a_layer_without_a_gradient_is_timed_too() -> None:
    layers = nn.Sequential(nn.Embedding(5, 4).requires_grad_(False), nn.Tanh(), nn.ReLU(inplace=True))
    told: list[float] = []
    found = measure_layers(layers, torch.zeros(2, 3, dtype=torch.int64), repeats=1, on_layer=told.append)
    assert [cost.seconds for cost in found] == told and min(told) > 0


class LastToken(nn.Module):
    """Returns a view of a large tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


class Chunks(nn.Module):
    """Returns two of three views of one tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.chunk(3, dim=-1)[:2]


def test_of_a_view_travels_what_it_shows() -> None:
    (cost,) = analyze_layers(nn.Sequential(LastToken()), torch.zeros(2, 128, 6))
    assert cost.output_bytes == 4 * 2 * 6
    (cost,) = analyze_layers(nn.Sequential(Chunks()), torch.zeros(2, 5, 6))
    assert cost.output_bytes == 4 * 2 * 5 * 4


@pytest.mark.parametrize("num_directions", [1, 2])
def test_an_lstm_multiplies_by_two_matrices_per_step_and_example(num_directions: int) -> None:
    time, batch, inputs, state = 7, 3, 8, 16

    class First(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            found: Tensor = super().forward(x)[0]
            return found

    layers = nn.Sequential(First(inputs, state, bidirectional=num_directions == 2))
    (profile, _) = profile_layers(layers, lambda o, _: o.sum(), (torch.zeros(time, batch, inputs), torch.zeros(1)))
    assert profile.forward_flops == 2 * time * batch * 4 * state * (inputs + state) * num_directions
    assert profile.backward_flops == 2 * profile.forward_flops


def test_products_with_vectors_and_of_three_tensors_are_counted() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.matrix = nn.Bilinear(8, 8, 4), nn.Parameter(torch.zeros(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            both: Tensor = self.bilinear(x, x)
            return both @ (self.matrix.mT @ torch.ones(5))

    (cost,) = analyze_layers(nn.Sequential(Products()), torch.zeros(3, 8))
    assert cost.flops == 2 * 3 * 4 * 8 * 8 + 2 * 5 * 4 + 2 * 3 * 4
