"""A seed is a function of its keys, and the user's generators are left alone."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe.models import amoebanet_d
from gpipe.pipeline.layers.generators import preserved_generators
from gpipe.pipeline.randomness import can_draw_from_others, derive_seed, seed_generators

CPU = torch.device("cpu")


@given(st.lists(st.integers(-(2**70), 2**70), max_size=5))
def test_a_seed_is_a_function_of_its_keys_with_32_bits(keys: list[int]) -> None:
    seed = derive_seed(*keys)
    assert seed == derive_seed(*keys)
    assert 0 <= seed < 2**32


def test_seeds_do_not_change_from_version_to_version() -> None:
    # Written down when checkpoints first depended on them: a resumed run must find the same masks.
    assert [derive_seed(), derive_seed(0), derive_seed(1, 2, 3)] == [2654435769, 1853398634, 3540394316]


def test_the_order_of_the_keys_counts() -> None:
    seeds = {derive_seed(*keys) for keys in itertools.permutations((0, 1, 2, 3, 4))}
    assert len(seeds) == math.factorial(5)


def test_one_more_zero_gives_another_seed() -> None:
    assert len({derive_seed(*[0] * length) for length in range(10)}) == 10


def test_seeds_of_a_training_collide_no_more_than_random_numbers_would() -> None:
    grid = itertools.product(range(5), range(200), range(16), range(12))  # seed, step, micro-batch, layer
    seeds = [derive_seed(0x3A5, *keys) for keys in grid]
    collisions = len(seeds) - len(set(seeds))
    expected = len(seeds) ** 2 / 2**33
    assert collisions <= expected + 5 * math.sqrt(expected)


def test_every_bit_of_a_seed_depends_on_every_key() -> None:
    for place in range(4):
        flipped = 0
        for value in range(64):
            keys = [7, 7, 7, 7]
            keys[place] = value
            flipped |= derive_seed(*keys) ^ derive_seed(7, 7, 7, 7)
        assert flipped == 2**32 - 1


def test_torch_tells_seeds_apart_that_differ_in_any_of_the_32_bits() -> None:
    draws = set()
    for bit in range(32):
        seed_generators(1 << bit)
        draws.add(tuple(torch.rand(2).tolist()))
    assert len(draws) == 32


def test_generators_are_as_they_were_afterwards() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with preserved_generators([CPU]):
        seed_generators(1)
        torch.rand(3)
    assert torch.equal(torch.rand(4), expected)


def test_generators_are_as_they_were_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError), preserved_generators([CPU]):
        torch.rand(3).view(7)
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_of_torch_timm_and_ours_draw_from_torchs_generators_alone() -> None:
    known = [
        nn.LSTM(2, 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        gpipe.convert_batch_norm(amoebanet_d(3, 32, 10, drop_path=0.5)),
    ]
    assert not any(can_draw_from_others(module) for layer in known for module in layer.modules())


class _Own(nn.Linear):
    pass


def _scale(*values: Any) -> Any:
    output: Tensor = values[-1]
    return output * random.random()


def _with_forward() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = _scale  # type: ignore[method-assign, assignment]
    return layer


def _with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(_scale)
    return layer


def _with_activation() -> nn.Module:
    return nn.TransformerEncoderLayer(2, 1, 2, activation=_scale)


@pytest.mark.parametrize("make", [lambda: _Own(2, 2), _with_forward, _with_hook, _with_activation])
def test_what_a_user_wrote_may_draw_from_others(make: Any) -> None:
    assert any(can_draw_from_others(module) for module in make().modules())


def test_a_hook_that_a_layer_gets_between_steps_draws_the_same_for_every_number_of_stages() -> None:
    batch = torch.ones(4, 2), torch.ones(4, 2)
    gradients = []
    for partitions, mode in (([2], "never"), ([2], "always"), ([1, 1], "always")):
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.fill_(0.5)
        pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, partitions, 2, rematerialize=mode)
        pipeline.train_step(batch)
        layers[1].register_forward_hook(_scale)
        pipeline.train_step(batch)
        gradients.append([parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None])
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))
