"""Profiles of sizes that nobody described: between two others, and exactly where three are on a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe.models import amoebanet_b, transformer_lm
from gpipe.planning.interpolation import KnownProfiles
from gpipe.planning.ledger import Work
from gpipe.planning.observed_model import PerPass
from gpipe.planning.profile import LayerProfile, profile_layers
from tests.planning.small_profiles import LOSS, layer


def test_profiles_between_two_sizes_lie_on_a_line() -> None:
    asked = []

    def profiler(size: int) -> list[LayerProfile]:
        asked.append(size)
        if size == 1:
            raise ValueError("too few examples for batch norm")
        return [layer(parameter_bytes=8, kept=3 + 10 * size, flops=7 * size), LOSS]

    profiles = KnownProfiles(profiler, estimates=True)
    profiles.describe_ends((4, 16, 1, 2))
    assert profiles(4) == [
        replace(layer(parameter_bytes=8, kept=43, flops=28), deferred_bytes=profiles(4)[0].deferred_bytes),
        LOSS,
    ]
    assert asked == [1, 2, 16]
    with pytest.raises(ValueError, match="too few examples"):
        profiles(1)
    assert profiles(32)[0].kept_bytes == 323  # in earnest


def test_a_loss_in_more_pieces_is_interpolated_as_one_operation() -> None:
    def profiler(size: int) -> list[LayerProfile]:
        return [layer(flops=7 * size), replace(LOSS, forward=(Work(0, 100),) * size, backward=(Work(2, 50),) * size)]

    profiles = KnownProfiles(profiler, estimates=True)
    profiles.describe_ends((2, 4, 16))
    assert profiles(4)[1] == replace(LOSS, forward=(Work(0, 400),), backward=(Work(8, 200),))
    assert profiles(4)[0] == profiler(4)[0]


@given(
    st.lists(st.tuples(st.integers(0, 10**16), st.integers(0, 10**16)), min_size=1, max_size=3),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_what_lies_between_is_what_describing_returns(sums: list[tuple[int, int]], sizes: list[int]) -> None:
    """Moments grow with the size in straight lines, which cross; the peak is the highest of them."""

    def profiler(size: int) -> list[LayerProfile]:
        moments = tuple(start + grows * size for start, grows in sums)
        return [replace(layer(flops=7 * size), heights=PerPass(*[moments] * 8))]

    asked: list[int] = []

    def ask(size: int) -> list[LayerProfile]:
        asked.append(size)
        return profiler(size)

    known = KnownProfiles(ask)
    assert [known(size) for size in sizes] == [profiler(size) for size in sizes]
    ends = [size for i, size in enumerate(sizes) if i == 0 or not min(sizes[:i]) <= size <= max(sizes[:i])]
    assert asked == ends


def test_what_has_other_moments_is_described() -> None:
    asked: list[int] = []

    def profiler(size: int) -> list[LayerProfile]:
        asked.append(size)
        return [replace(layer(kept=3 + 10 * size), heights=PerPass(*[(1,) * size] * 8))]

    known = KnownProfiles(profiler)
    assert [known(size)[0].kept_bytes for size in (1, 8, 4, 4)] == [13, 83, 43, 43]
    assert asked == [1, 8, 4]


@pytest.mark.parametrize("name", ["made_by", "freed_by", "kept_by"])
def test_nothing_lies_between_two_layers(name: str) -> None:
    """An input that another layer is the last to need makes the profile another one."""
    asked: list[int] = []

    def profiler(size: int) -> list[LayerProfile]:
        asked.append(size)
        taken = LOSS.inputs[0]._replace(**{name: size})
        return [replace(layer(), heights=PerPass(*[(1,)] * 8), inputs=(taken,))]

    known = KnownProfiles(profiler)
    assert [known(size)[0].inputs for size in (2, 8, 4)] == [profiler(size)[0].inputs for size in (2, 8, 4)]
    assert asked[:3] == [2, 8, 4]


def small_amoebanet() -> nn.Sequential:
    return amoebanet_b(num_layers=3, num_filters=8, num_classes=10, image_size=32, drop_path=0.1, dropout=0.5)


def small_transformer() -> nn.Sequential:
    return transformer_lm(3, vocabulary_size=50, model_size=32, feedforward_size=64, num_heads=4, dropout=0.1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["amoebanet", "transformer"])
def test_layers_between_two_sizes_are_exact(kind: str, training: bool) -> None:
    if kind == "amoebanet":
        layers, example = small_amoebanet(), torch.zeros(64, 3, 32, 32)
        targets, loss = torch.zeros(64, dtype=torch.int64), F.cross_entropy
    else:
        layers, example = small_transformer(), torch.zeros(64, 7, dtype=torch.int64)
        targets, loss = example, lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())

    def profiler(size: int) -> list[LayerProfile]:
        return profile_layers(layers, loss, (example[:size], targets[:size]), training=training)

    known = KnownProfiles(profiler)
    known(2), known(64)
    known._profiler = lambda size: pytest.fail(f"{size} is described")
    for size in (3, 33):
        assert known(size) == profiler(size)
