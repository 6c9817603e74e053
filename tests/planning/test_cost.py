"""Costs are those that arithmetic on paper and a real run on the CPU give."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe.planning.cost import LayerCost, analyze_layers, measure_layers

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


def kept_bytes(layers: nn.Sequential, example: Tensor) -> int:
    """Run the plain model on the CPU and add up the distinct storages that autograd keeps."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in (*layers.parameters(), *layers.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layers(example)
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in ignored)


def test_a_linear_layer_costs_what_paper_and_pencil_say() -> None:
    (cost,) = analyze_layers(nn.Sequential(nn.Linear(5, 3)), torch.empty(2, 5))
    assert cost == LayerCost(
        flops=2 * 2 * 5 * 3,
        parameters=5 * 3 + 3,
        parameter_bytes=4 * (5 * 3 + 3),
        output_bytes=4 * 2 * 3,
        activation_bytes=4 * 2 * 5,  # the input, for the weight's gradient
        seconds=None,
    )


def test_a_grouped_convolution_in_half_precision_costs_what_paper_and_pencil_say() -> None:
    convolution = nn.Conv2d(4, 6, kernel_size=3, stride=2, groups=2, bias=False, dtype=torch.bfloat16)
    (cost,) = analyze_layers(nn.Sequential(convolution), torch.empty(2, 4, 9, 9, dtype=torch.bfloat16))
    assert cost.flops == 2 * (2 * 6 * 4 * 4) * (2 * 3 * 3)
    assert (cost.parameters, cost.parameter_bytes) == (6 * 2 * 3 * 3, 2 * 6 * 2 * 3 * 3)
    assert cost.output_bytes == 2 * (2 * 6 * 4 * 4)
    assert cost.activation_bytes == 2 * (2 * 4 * 9 * 9)


def test_batch_norm_keeps_its_input_and_two_statistics_a_channel_but_not_its_buffers() -> None:
    (cost,) = analyze_layers(nn.Sequential(nn.BatchNorm2d(4)), torch.empty(2, 4, 3, 3))
    assert (cost.flops, cost.parameters) == (0, 8)
    assert cost.output_bytes == 4 * (2 * 4 * 3 * 3)
    assert cost.activation_bytes == 4 * (2 * 4 * 3 * 3) + 2 * 4 * 4


def test_a_storage_counts_in_the_first_layer_that_keeps_it() -> None:
    layers = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Flatten(), nn.Linear(5, 5))
    costs = analyze_layers(layers, torch.empty(2, 5))
    in_bytes = 4 * 2 * 5
    # The second linear layer's input is the output that the rectifier has kept already.
    assert [cost.activation_bytes for cost in costs] == [in_bytes, in_bytes, 0, 0, in_bytes]


@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5)),
        nn.Sequential(
            nn.Conv2d(2, 4, 3).requires_grad_(False), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.Flatten()
        ),
        nn.Sequential(nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 3), nn.GELU(), nn.LayerNorm(3)),
    ],
    ids=["convolutions", "frozen", "head"],
)
def test_all_layers_together_keep_what_autograd_keeps_in_a_real_run(layers: nn.Sequential) -> None:
    example = torch.rand(3, 2, 8, 8)
    total = sum(cost.activation_bytes for cost in analyze_layers(layers, example))
    assert total == kept_bytes(copy.deepcopy(layers), example)


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


def test_integer_inputs_are_described() -> None:
    (cost,) = analyze_layers(nn.Sequential(nn.Embedding(10, 4)), torch.zeros(2, 3, dtype=torch.int64))
    assert (cost.flops, cost.output_bytes, cost.activation_bytes) == (0, 4 * 2 * 3 * 4, 8 * 2 * 3)


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


@both
def test_a_layer_that_looks_at_values_is_named(analysis: Analysis) -> None:
    message = r"^Layer 1 \(Peek\) cannot be described on the meta device \(.*\); check the .* your own costs\.$"
    with pytest.raises(ValueError, match=message):
        analysis(nn.Sequential(nn.ReLU(), Peek()), torch.rand(2, 4))


def test_a_shape_that_does_not_fit_names_the_layer() -> None:
    with pytest.raises(
        ValueError, match=r"^Layer 1 \(Linear\) cannot be described on the meta device \(RuntimeError: .*\); "
    ):
        analyze_layers(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), torch.rand(2, 4))


def test_the_meta_device_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match=r"^The layers or the example are on the meta device; move both to a real one"):
        measure_layers(nn.Sequential(nn.Linear(4, 4, device="meta")), torch.rand(2, 4))


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^repeats is 0; time every layer at least once\.$"):
        measure_layers(nn.Sequential(nn.ReLU()), torch.rand(2, 4), repeats=0)
