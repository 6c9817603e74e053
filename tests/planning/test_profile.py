"""What is said of each layer, beside what the layers really are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import gpipe
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.layers.structure import structure
from gpipe.pipeline.microbatch import Payload
from gpipe.planning.observed_model import Arrival, Input, WaitingGradient
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.repeats import Shortened
from tests.planning.small_profiles import LOSS


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def small_transformer(num_layers: int) -> nn.Sequential:
    return transformer_lm(num_layers, vocabulary_size=100, model_size=16, feedforward_size=32, num_heads=2)


TOKENS = torch.zeros(2, 8, dtype=torch.int64)


def test_flops_and_parameters_are_those_of_the_described_layers() -> None:
    layers = gpipe.convert_batch_norm(amoebanet_d(3, 16, 10, image_size=32, auxiliary_head=False))
    images = torch.zeros(2, 3, 32, 32)
    profiles = profile_layers(layers, F.cross_entropy, (images, torch.zeros(2, dtype=torch.int64)))
    value: Any = images
    for layer, profile, following in zip(layers, profiles, profiles[1:], strict=False):
        with FlopCounterMode(display=False) as counter:
            value = layer(value)
        assert profile.forward_flops == counter.get_total_flops()
        assert profile.parameter_bytes == sum(parameter.nbytes for parameter in layer.parameters())
        assert following.input_bytes == sum(tensor.nbytes for tensor in Payload.of(value).tensors)
    costs = gpipe.analyze_layers(layers, images)
    assert [cost.flops for cost in costs] == [profile.forward_flops for profile in profiles[:-1]]
    assert [cost.output_bytes for cost in costs] == [profile.boundary_bytes for profile in profiles[1:]]
    assert [layer.training for layer in layers] == [True] * len(layers)
    assert all(not parameter.is_meta and parameter.grad is None for parameter in layers.parameters())


def test_a_backward_has_two_products_for_each_of_the_forward() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    profiles = profile_layers(layers, F.cross_entropy, (torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)))
    first, _, last, _ = profiles
    assert (last.forward_flops, last.backward_flops) == (2 * 3 * 16 * 4, 2 * 2 * 3 * 16 * 4)
    assert first.backward_flops == first.forward_flops  # nobody wants the gradient of the mini-batch


def test_what_waits_in_a_split_backward_is_the_products_weights_with_their_inputs_and_gradients() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4), nn.Linear(4, 4))
    profiles = profile_layers(layers, F.cross_entropy, (torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)))
    flops = [sum(work.flops for work in profile.weight_gradients) for profile in profiles]
    assert flops == [0, 0, profiles[2].forward_flops, profiles[3].forward_flops, 0]
    assert [profile.deferred_bytes for profile in profiles] == [0, 0, 4 * 3 * (16 + 4), 4 * 3 * (4 + 4), 0]
    third, last = (WaitingGradient(size, size, size, is_added=True) for size in (4 * (16 + 1) * 4, 4 * (4 + 1) * 4))
    assert [profile.waiting_gradients for profile in profiles] == [(), (), (third,), (last,), ()]


def test_memory_of_three_layers_followed_by_hand() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    profiles = profile_layers(layers, F.cross_entropy, (torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)))
    first, tanh, last, _ = profiles
    batch, hidden, logits = 4 * 3 * 8, 4 * 3 * 16, 4 * 3 * 4
    assert [profile.input_bytes for profile in profiles] == [batch, hidden, hidden, logits]
    # Tanh keeps its result alone: the first layer's is gone after it, and the last layer keeps no other.
    assert [profile.kept_bytes for profile in (first, tanh, last)] == [hidden, 0, logits]
    assert tanh.inputs == (Input(hidden, -1, 0, None),)
    assert last.inputs == (Input(hidden, -1, None, -1),)
    assert tanh.peaks.quiet == tanh.peaks.forward == hidden
    assert first.statistics_bytes == 0 and first.trainable_bytes == 4 * (8 * 16 + 16)


def test_gradients_that_arrive_are_those_of_tensors_that_need_one_and_are_not_the_last_layers() -> None:
    class Split(nn.Module):
        def forward(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first, second = values.chunk(2, -1)
            return first * 2, second * 2, torch.ones(3)

    class Pass(nn.Module):
        def forward(self, payload: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            return payload[0], payload[1].exp(), payload[2]

    class Join(nn.Module):
        def forward(self, payload: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            return torch.cat([payload[0], payload[1]], -1)

    layers = nn.Sequential(nn.Linear(8, 8), Split(), Pass(), Join())
    linear, split, passing, joining, loss = profile_layers(layers, lambda o, _: o.sum(), (torch.zeros(3, 8), TOKENS))
    half, whole = 4 * 3 * 4, 4 * 3 * 8
    assert split.arrivals == (Arrival(whole, whole, -1),)
    # The gradients of both halves are parts of the sum's, which is one number.
    assert joining.arrivals == (Arrival(half, 4, -2), Arrival(half, 0, -1))
    assert passing.arrivals == (Arrival(half, 4, -1), Arrival(half, half, -1))
    assert loss.arrivals == (Arrival(whole, 4, -1),)
    # The gradient that arrives is there while the weight's is made. A stage that ends with the layer has it elsewhere.
    assert linear.peaks.backward - linear.peaks.last_backward == whole


def test_a_frozen_parameter_gets_no_gradient() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    layers[0].requires_grad_(False)
    profiles = profile_layers(layers, F.cross_entropy, (torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)))
    assert [profile.trainable_bytes for profile in profiles] == [0, 4 * (8 * 4 + 4), 0]
    assert profiles[0].backward_flops == 0


def test_equal_layers_are_looked_at_three_times_and_told_for_all() -> None:
    shortened = profile_layers(small_transformer(6), loss, (TOKENS, TOKENS))
    whole = [
        profile_layers(small_transformer(3), loss, (TOKENS, TOKENS))[index] for index in (0, 1, 2, 2, 2, 2, 3, 4, 5)
    ]
    assert len(shortened) == 9
    assert shortened == whole


def test_only_equal_layers_in_a_row_that_keep_the_shape_are_left_out() -> None:
    layers = small_transformer(5)
    assert Shortened.of(layers).counts == [1, 1, 3, 1, 1]
    layers[3].dropout.p = 0.5
    assert Shortened.of(layers).counts == [1, 1, 1, 1, 1, 1, 1]
    growing = nn.Sequential(*(nn.Upsample(scale_factor=2) for _ in range(5)), nn.Flatten())
    profiles = profile_layers(growing, lambda outputs, _: outputs.sum(), (torch.zeros(1, 1, 2), TOKENS))
    assert [profile.input_bytes for profile in profiles[:5]] == [8, 16, 32, 64, 128]


def test_a_module_with_an_unknown_attribute_equals_no_other() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert structure(one) == structure(other)
    one.note, other.note = object(), object()  # type: ignore[assignment]
    assert structure(one) != structure(other)


def test_autocast_halves_what_products_keep() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    example = (torch.zeros(32, 64), torch.zeros(32, dtype=torch.int64))
    full = profile_layers(layers, F.cross_entropy, example)
    half = profile_layers(
        layers,
        lambda o, t: F.cross_entropy(o.float(), t),
        example,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16),
    )
    assert half[1].input_bytes * 2 == full[1].input_bytes


def test_what_autocast_makes_of_weights_is_there_once_and_no_part_of_a_graph() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False).requires_grad_(False))
    example = (torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets)

    full = profile_layers(layers, loss, example)
    half = profile_layers(layers, loss, example, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    weight = 64 * 64 * 2
    assert [profile.converted_bytes for profile in full] == [0] * 4
    assert [profile.converted_bytes for profile in half] == [weight + 64 * 2, 0, 0, 0]
    assert half[0].kept_bytes < weight // 4
    assert half[2].kept_bytes >= weight  # a frozen one is converted each time


def test_what_the_next_layer_converts_crosses_a_boundary_converted() -> None:
    example = (torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    for following, itemsize in ((nn.Linear(64, 3), 2), (nn.Sequential(nn.Tanh(), nn.Linear(64, 3)), 4)):
        layers = nn.Sequential(nn.Embedding(10, 64), following)
        found = profile_layers(layers, F.cross_entropy, example, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
        assert found[1].input_bytes == found[1].arrivals[0].size == 8 * 64 * itemsize


class Looks(nn.Module):
    """Looks at the values of its input."""

    def forward(self, value: Tensor) -> Tensor:
        return value if bool(value.sum() > 0) else -value


def test_a_layer_that_looks_at_values_is_named() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), Looks())
    with pytest.raises(ValueError, match=r"^Layer 1 \(Looks\) cannot be described without data .*; check the example"):
        profile_layers(layers, F.cross_entropy, (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)))


def test_a_loss_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match=r"^The loss cannot be described without data"):
        profile_layers(nn.Sequential(nn.Linear(2, 2)), F.cross_entropy, (torch.zeros(1, 2), torch.zeros(3)))


def test_a_profile_is_made_without_touching_the_generators() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    before = torch.get_rng_state()
    found = profile_layers(layers, F.cross_entropy, (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)))
    assert isinstance(found[0], LayerProfile)
    assert torch.equal(torch.get_rng_state(), before)


class Skip(nn.Module):
    """Hands on what it takes, twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 2 * x


class Passing(nn.Module):
    """Changes the first tensor, and passes the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(both[0]).relu(), both[1]


class Join(nn.Module):
    """Adds the two."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] * both[1]


@pytest.mark.parametrize("num_passing", [4, 5, 9])
def test_a_tensor_that_equal_layers_pass_on_is_held_from_where_it_was_made_to_where_it_is_used(
    num_passing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.Sequential(
        nn.Linear(8, 8), Skip(), *(Passing() for _ in range(num_passing)), Join(), *(nn.Linear(8, 8) for _ in range(5))
    )
    example = torch.zeros(3, 8), torch.zeros(3, 8)
    shortened = profile_layers(layers, F.mse_loss, example)
    monkeypatch.setattr(Shortened, "expand", lambda *_: None)
    whole = profile_layers(layers, F.mse_loss, example)
    assert len({one.inputs for one in whole[2 : 2 + num_passing]}) > 2
    assert shortened == whole


class Branches(nn.Module):
    """Makes two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 3 * x, 2 * x


class Adding(Passing):
    """Adds the second tensor to the first, and passes it on."""

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(both[0]) + both[1], both[1]


@pytest.mark.parametrize("num_adding", [4, 5, 9])
def test_three_of_equal_layers_tell_of_all_although_each_is_at_another_distance_from_what_it_takes(
    num_adding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding = (Adding() for _ in range(num_adding))
    layers = nn.Sequential(nn.Linear(8, 8), Branches(), *adding, Join(), nn.Linear(8, 8))
    shortened = Shortened.of(layers)
    assert len(shortened.layers) == 7
    expand = shortened.expand
    monkeypatch.setattr(Shortened, "expand", lambda *_: None)
    example = torch.zeros(3, 8), torch.zeros(3, 8)
    three, whole = (profile_layers(nn.Sequential(*those), F.mse_loss, example) for those in (shortened.layers, layers))
    assert len({one.inputs for one in whole[2 : 2 + num_adding]}) > 2
    assert expand(three) == whole


def test_weight_gradients_are_added_at_once_or_together_as_many_as_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpipe.planning.profile.CACHE_BYTES", 10)
    gradients = (
        WaitingGradient(4, 6, 8, is_added=False),
        WaitingGradient(8, 40, 16, is_added=False),  # 4 + 40; then 12 > 10, which become 24 that stay
        WaitingGradient(5, 20, 5, is_added=True),
        WaitingGradient(5, 30, 5, is_added=True),
        WaitingGradient(12, 12, 20, is_added=False),
        WaitingGradient(3, 3, 6, is_added=False),
        WaitingGradient(2, 30, 4, is_added=False),  # for the first time: 24 + 5 + 5 + 20 stay, 3 wait
    )
    assert replace(LOSS, waiting_gradients=gradients).weights_peaks == (4 + 40, 24 + 5 + 5 + 20 + 3 + 30)
    assert replace(LOSS, waiting_gradients=gradients[:2]).weights_peaks == (4 + 40, 4 + 40)
    assert replace(LOSS, waiting_gradients=gradients[:1]).weights_peaks == (4 + 8, 4 + 8)
