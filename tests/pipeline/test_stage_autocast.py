"""Autocast around a step reaches every stage, the recomputation and the loss."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


class Conversions(TorchDispatchMode):
    """Counts the conversions of each of some tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = dict.fromkeys(map(id, tensors), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.counts:
            self.counts[id(args[0])] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("is_cached", "expected"), [(True, {1}), (False, {"always": {8}, "except_last": {7}})])
def test_each_weight_is_converted_once_per_step_where_autocast_may_cache(
    mode: str, is_cached: bool, expected: Any
) -> None:
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 4, rematerialize=mode)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached),
        Conversions(list(layers.parameters())) as found,
    ):
        pipeline.train_step(batch())
    assert set(found.counts.values()) == (expected if is_cached else expected.get(mode, {4}))


def test_an_evaluation_converts_each_weight_once() -> None:
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 4)
    with mixed(), Conversions(list(layers.parameters())) as found:
        pipeline.evaluate(batch()[0])
    assert set(found.counts.values()) == {1}


def test_one_copy_of_a_weight_gives_the_gradients_of_a_copy_per_micro_batch() -> None:
    found = []
    for is_cached in (True, False):
        layers = build()
        pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 4, rematerialize="except_last")
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached):
            pipeline.train_step(batch())
        assert all(parameter.grad.dtype == torch.float32 for parameter in layers.parameters())  # type: ignore[union-attr]
        found.append([parameter.grad for parameter in layers.parameters()])
    assert all(map(torch.equal, *found))


def test_a_step_and_an_evaluation_see_the_weights_after_an_update_in_the_same_region() -> None:
    layers = build()
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 2)
    with mixed():
        pipeline.train_step(batch())
        torch.optim.SGD(layers.parameters(), lr=0.5).step()
        expected = build()
        expected.load_state_dict(layers.state_dict())
        for found in (layers(batch()[0]), pipeline.evaluate(batch()[0])):
            assert torch.equal(found, expected(batch()[0]))
        layers.zero_grad()
        pipeline.train_step(batch())
        other = gpipe.Pipeline(expected, F.cross_entropy, [2, 3], 2)
        other.train_step(batch())
    assert_equal(layers, [parameter.grad for parameter in expected.parameters()])


class LooksAhead(nn.Linear):
    """Uses its weight first without a graph."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            ahead = super().forward(value)
        return super().forward(value) + ahead


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_is_used_first_without_a_graph_gets_its_gradient(mode: str) -> None:
    layers, expected = (nn.Sequential(LooksAhead(4, 6), nn.Linear(6, 3)) for _ in range(2))
    expected.load_state_dict(layers.state_dict())
    with mixed():
        F.cross_entropy(expected(batch()[0]), batch()[1]).backward()
        gpipe.Pipeline(layers, F.cross_entropy, [1, 1], 1, rematerialize=mode).train_step(batch())
    assert_equal(layers, [parameter.grad for parameter in expected.parameters()])


def test_autocast_holds_no_boundary_input_until_the_end_of_the_step() -> None:
    inputs, alive = list[StorageWeakRef](), list[int]()

    class Residual(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            inputs.append(StorageWeakRef(x.untyped_storage()))
            return x + super().forward(x)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        alive.append(len({ref.cdata for ref in inputs if not ref.expired()}))
        return F.cross_entropy(outputs, targets)

    pipeline = gpipe.Pipeline(nn.Sequential(Residual(4, 4), Residual(4, 4)), loss, [1, 1], 4, schedule="1f1b")
    with mixed():
        pipeline.train_step(batch())
    assert alive == [2] * 4  # the mini-batch's memory, and that of one boundary input
