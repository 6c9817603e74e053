"""Autocast around a step reaches every stage, the recomputation and the loss."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe

MODES = ("always", "except_last", "never")


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def mixed() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def plain_gradients() -> list[Tensor | None]:
    plain = build()
    with mixed():
        loss = F.cross_entropy(plain(batch()[0]), batch()[1])
    loss.backward()
    return [parameter.grad for parameter in plain.parameters()]


def assert_equal(found: nn.Module, expected: list[Tensor | None]) -> None:
    for (name, parameter), gradient in zip(found.named_parameters(), expected, strict=True):
        assert parameter.grad is not None, name
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("partitions", [[5], [1, 4], [2, 1, 2]])
def test_one_micro_batch_has_the_plain_models_gradients(partitions: list[int], mode: str) -> None:
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 1, rematerialize=mode)
    with mixed():
        pipeline.train_step(batch())
    assert_equal(layers, plain_gradients())


def test_several_micro_batches_have_the_same_gradients_in_every_mode_and_for_every_cut() -> None:
    expected: list[Tensor | None] = []
    for partitions, mode in itertools.product(([5], [1, 4], [2, 1, 2]), MODES):
        layers = build()
        pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 3, rematerialize=mode)
        with mixed():
            pipeline.train_step(batch())
        expected = expected or [parameter.grad for parameter in layers.parameters()]
        assert_equal(layers, expected)


def test_every_layer_computes_in_the_type_that_was_asked_for_also_when_it_recomputes() -> None:
    layers, types = build(), []
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: types.append(output.dtype))
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 2, 1], 2)
    with mixed():
        pipeline.train_step(batch())
    assert types == [torch.bfloat16] * 20
    types.clear()
    pipeline.train_step(batch())
    assert types == [torch.float32] * 20


def test_weights_get_gradients_after_an_evaluation_in_the_same_region() -> None:
    for first in ("evaluate", "plain"):
        layers = build()
        pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 1)
        with mixed():
            if first == "evaluate":
                pipeline.evaluate(batch()[0])
            else:
                with torch.no_grad():
                    layers(batch()[0])  # leaves converted weights without a history in autocast's cache
            pipeline.train_step(batch())
        assert_equal(layers, plain_gradients())


def test_the_users_cache_is_as_it_was() -> None:
    pipeline = gpipe.Pipeline(build(), F.cross_entropy, [5], 2)
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=enabled):
            pipeline.train_step(batch())
            assert torch.is_autocast_cache_enabled() is enabled


def test_evaluation_has_the_plain_models_outputs() -> None:
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 1)
    with mixed(), torch.no_grad():
        assert torch.equal(pipeline.evaluate(batch()[0]), layers(batch()[0]))
