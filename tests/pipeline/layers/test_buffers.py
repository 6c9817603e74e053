"""Buffers change once per micro-batch: in the forward, and not again in the recomputation or in a step that failed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline._compat import noting_averages
from tests.pipeline.recomputed_layers import (
    MODES,
    STATEFUL,
    MappedBatchNorm,
    OwnBatchNorm,
    assert_equal,
    batch,
    build,
    train,
)
from tests.support.layer_zoo import LENGTH, SIZE, Averages


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STATEFUL)
def test_buffers_move_as_in_one_forward_per_micro_batch(kind: str, mode: str) -> None:
    layers = build(STATEFUL[kind])
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 3, rematerialize=mode)
    pipeline.train_step(batch())
    plain = build(STATEFUL[kind])
    for part in batch()[0].split([3, 2, 2]):
        plain(part)
    for (name, found), expected in zip(layers.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("kind", STATEFUL)
def test_looking_for_faults_before_any_step_leaves_buffers_as_they_are(kind: str) -> None:
    layers = build(STATEFUL[kind])
    before = {name: buffer.clone() for name, buffer in layers.named_buffers()}
    gpipe.Pipeline(layers, lambda outputs, _: outputs.sum(), [2, 3], 3).first_non_finite(batch())
    assert_equal(dict(layers.named_buffers()), before)


@pytest.mark.parametrize("kind", STATEFUL)
def test_buffers_of_a_step_that_failed_are_as_before(kind: str) -> None:
    layers = build(STATEFUL[kind])
    before = {name: buffer.clone() for name, buffer in layers.named_buffers()}
    pipeline = gpipe.Pipeline(layers, lambda outputs, _: outputs.sum() * torch.inf, [2, 3], 3)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step(batch())
    assert_equal(dict(layers.named_buffers()), before)
    pipeline.first_non_finite(batch())
    assert_equal(dict(layers.named_buffers()), before)


class Late(Averages):
    """Does not change its buffers in the first micro-batch of three."""

    def forward(self, x: Tensor) -> Tensor:
        self.training = len(x) == 2
        return super().forward(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "switch"), [(OwnBatchNorm, "training"), (OwnBatchNorm, "is_on"), (MappedBatchNorm, "is_on")]
)
def test_averages_that_only_later_steps_move_are_moved_and_undone_as_the_others(
    make: Callable[[], nn.Module], switch: str, mode: str
) -> None:
    layers, plain = build(make), build(make)
    factor = 1.0
    pipeline = gpipe.Pipeline(
        layers, lambda outputs, targets: F.cross_entropy(outputs, targets) * factor, [2, 3], 3, rematerialize=mode
    )
    for norm in (layers[1], layers[3]):
        setattr(norm, switch, False)
    pipeline.train_step(batch())
    for norm in (layers[1], layers[3]):
        setattr(norm, switch, True)
    factor = torch.inf
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step(batch())
    assert_equal(dict(layers.named_buffers()), dict(plain.named_buffers()))
    factor = 1.0
    layers.zero_grad()
    pipeline.train_step(batch())
    for part in batch()[0].split([3, 2, 2]):
        plain(part)
    assert_equal(dict(layers.named_buffers()), dict(plain.named_buffers()))


def test_each_thread_notes_the_averages_that_it_moves_itself() -> None:
    def move() -> list[int]:
        averages = [torch.zeros(LENGTH), torch.ones(LENGTH)]
        F.batch_norm(batch()[0], *averages, training=True)
        return list(map(id, averages))

    def note() -> None:
        with noting_averages() as noted:
            assert move() == list(map(id, noted))

    before = torch.batch_norm
    with noting_averages() as noted, ThreadPoolExecutor(1) as thread:
        thread.submit(note).result()
        assert move() == list(map(id, noted))
    assert torch.batch_norm is before


class Begins(nn.Module):
    """Makes its moving average in its first forward."""

    def __init__(self, *, is_declared: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        if is_declared:
            self.register_buffer("average", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if getattr(self, "average", None) is None:
            self.register_buffer("average", mean)
        else:
            self.average = 0.9 * self.average + mean
        return self.linear(x) * (1 + self.average)


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_recomputation_makes_the_buffers_that_the_forward_made(is_declared: bool, mode: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Begins(is_declared=is_declared))
    plain, batch = copy.deepcopy(layers), (torch.randn(6, 3), torch.randn(6, 3))
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [2], 3, rematerialize=mode)
    for _ in range(2):
        pipeline.train_step(batch)
        for inputs, targets in zip(*(part.chunk(3) for part in batch), strict=True):
            (F.mse_loss(plain(inputs), targets) / 3).backward()
        assert torch.equal(layers[1].average, plain[1].average)
        for one, other in zip(layers.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_buffer_that_a_failed_step_made_is_gone(is_declared: bool) -> None:
    layers = nn.Sequential(Begins(is_declared=is_declared), nn.Linear(3, 3))
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [2], 2)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step((torch.full((4, 3), torch.inf), torch.zeros(4, 3)))
    assert getattr(layers[0], "average", None) is None and ("average" in layers[0]._buffers) == is_declared


class Scales(nn.Module):
    """Multiplies by a buffer that it has just changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(x.mean(0))
        return x * self.scale


def test_what_a_later_micro_batch_changes_that_a_kept_graph_needs_is_an_error_with_a_remedy() -> None:
    batch = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(gpipe.PipelineError, match=r"changed a buffer or a weight in a later micro-batch: let its forw"):
        gpipe.Pipeline(nn.Sequential(Scales()), F.mse_loss, [1], 2, rematerialize="never").train_step(batch)
    gpipe.Pipeline(nn.Sequential(Scales()), F.mse_loss, [1], 2).train_step(batch)


def test_a_buffer_that_begins_to_change_within_a_step_is_refused_where_it_must_be_known() -> None:
    message = (
        r"^stage 0, micro-batch 1, layer 1 \(Late\), forward: ValueError: the buffer layers\.1\.count changed in this "
        r"micro-batch, but not in the step's first one; .* or set rematerialize='never'$"
    )
    with pytest.raises(gpipe.PipelineError, match=message):
        train(Late, [2, 3], "always")
    train(Late, [2, 3], "never")


class CountsLater(nn.Module):
    """Counts the micro-batches behind the first one, which has three examples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            self.count += 1
        return x * (1 + self.count)


def test_a_buffer_that_began_to_change_within_a_step_is_undone_in_later_steps() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), CountsLater(), nn.Linear(4, 1))
    factor = 1.0
    pipeline = gpipe.Pipeline(layers, lambda x, _: x.mean() * factor, [1, 2], 3, rematerialize="never")
    mini_batch = torch.ones(7, 4), torch.zeros(7)
    pipeline.train_step(mini_batch)
    factor = torch.inf
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step(mini_batch)
    assert float(layers[1].count) == 2


class InfiniteAtLast(nn.Module):
    """Its third forward gives infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * torch.where(self.count == 3, torch.inf, 1.0)


def test_a_fault_that_depends_on_what_micro_batches_left_is_found() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), InfiniteAtLast(), nn.Linear(4, 1))
    pipeline = gpipe.Pipeline(layers, lambda outputs, _: outputs.mean(), [1, 2], 3)
    mini_batch = torch.ones(3, 4), torch.zeros(3)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step(mini_batch)
    found = pipeline.first_non_finite(mini_batch)
    assert found is not None and (found.layer, found.micro_batch) == (1, 2)
    assert float(layers[1].count) == 0


class Sums(nn.Module):
    """Adds what it returns to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.total += x.detach().sum()
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [lambda: nn.Linear(SIZE, SIZE), Sums], ids=["without buffers", "with one"])
@pytest.mark.parametrize("place", [lambda module: module, nn.Sequential], ids=["a layer", "in a layer"])
def test_a_module_of_torchscript_trains_as_the_one_it_was_made_of(
    make: Callable[[], nn.Module], place: Callable[[nn.Module], nn.Module], mode: str
) -> None:
    plain = build(make)
    scripted = copy.deepcopy(plain)
    scripted[1] = place(torch.jit.script(scripted[1]))
    for layers in (plain, scripted):
        pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 3, rematerialize=mode)
        for _ in range(2):
            pipeline.train_step(batch())
    for found, expected in zip(scripted.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    for found, expected in zip(scripted.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)
