"""A micro-batch that runs again computes the same bits, asks for the same gradients, and changes nothing else."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gpipe
import gpipe._compat.torchvision  # before timm and torchvision's models
from gpipe.pipeline._compat import noting_averages

# isort: split
import timm
from timm.layers import EvoNorm2dB0
from torchvision.models.densenet import _DenseBlock

from tests.support.layer_zoo import LENGTH, SIZE, Averages, Differentiates

MODES = ("always", "except_last", "never")


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Draws(nn.Module):
    """Draws from the generators that torch does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() * float(np.random.rand())


class Counts(nn.Module):
    """Counts forwards outside of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += not gpipe.is_recomputing()
        return x * 2


class Checkpointed(nn.Module):
    """Runs a module inside of torch's own checkpointing."""

    def __init__(self, module: nn.Module, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


class OwnBatchNorm(nn.Module):
    """Normalises by torch's function, which moves averages of its own."""

    is_on = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("averages", torch.stack([torch.zeros(LENGTH), torch.ones(LENGTH)]))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, *self.averages, training=self.training) if self.is_on else x


class MappedBatchNorm(OwnBatchNorm):
    """Does so in torch.func, for each of some averages."""

    def forward(self, x: Tensor) -> Tensor:
        def normalize(mean: Tensor, variance: Tensor) -> Tensor:
            return F.batch_norm(x, mean, variance, training=self.training)

        return torch.vmap(normalize)(*self.averages[:, None])[0] if self.is_on else x


class AsImage(nn.Module):
    """Gives a module for images [n, 4, 2, 3] what is a sequence elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.view(-1, LENGTH, 2, 3)).flatten(2)


class Dense(nn.Module):
    """DenseNet's block, with its own checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _DenseBlock(2, LENGTH, 2, 2, 0.0, memory_efficient=True)
        self.narrow = nn.Conv2d(8, LENGTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.block(x))


class OfTimm(nn.Module):
    """A small network of timm, which checkpoints its own stages."""

    def __init__(self) -> None:
        super().__init__()
        self.network = timm.create_model("test_resnet", in_chans=LENGTH, num_classes=LENGTH * SIZE)
        self.network.set_grad_checkpointing()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.view(-1, LENGTH, 2, 3)).view(-1, LENGTH, SIZE)


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "instance norm": lambda: nn.InstanceNorm1d(LENGTH, affine=True, track_running_stats=True),
    "EvoNorm": lambda: AsImage(EvoNorm2dB0(LENGTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(SIZE, SIZE)),
    "averages": Averages,
    "batch norm of its own": OwnBatchNorm,
    "averages in a checkpoint": lambda: Checkpointed(Averages()),
    "spectral norm in a checkpoint": lambda: Checkpointed(parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
    "autograd.grad": lambda: Differentiates("torch.autograd"),
    "torch.func": lambda: Differentiates("torch.func"),
    "batch norm before autograd.grad": lambda: nn.Sequential(nn.BatchNorm1d(LENGTH), Differentiates("torch.autograd")),
    "Python's and numpy's generators": Draws,
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "a checkpoint": lambda: Checkpointed(nn.BatchNorm1d(LENGTH)),
    "an old checkpoint": lambda: Checkpointed(
        nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(LENGTH)), use_reentrant=True
    ),
    "DenseNet": lambda: AsImage(Dense()),
    "timm": OfTimm,
}


def build(make: Callable[[], nn.Module]) -> nn.Sequential:
    """Return five layers, of which the second and the fourth are of a kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(SIZE, SIZE), make(), nn.Linear(SIZE, SIZE), make(), nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
        )
    gpipe.convert_batch_norm(layers)
    return layers


def batch(num_examples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_examples, LENGTH, SIZE, generator=generator), torch.arange(num_examples) % 3


def train(make: Callable[[], nn.Module], partitions: list[int], mode: str) -> dict[str, Any]:
    """Train for two steps; return losses, gradients and buffers by name."""
    layers = build(make)
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 3, rematerialize=mode)
    found: dict[str, Any] = {f"loss {step}": torch.tensor(pipeline.train_step(batch()).loss) for step in range(2)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in layers.named_parameters()}
    return found | dict(layers.named_buffers())


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value is expected[name] is None or torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", [*OTHERS, *STATEFUL])
def test_every_mode_and_cut_has_the_same_bits(kind: str) -> None:
    make = (OTHERS | STATEFUL)[kind]
    expected = train(make, [5], "never")
    for partitions, mode in (([5], "always"), ([2, 3], "except_last"), ([1, 1, 1, 2], "always"), ([2, 1, 2], "never")):
        assert_equal(train(make, partitions, mode), expected)


def test_batch_norm_without_weights_has_the_same_bits_under_autocast() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(LENGTH, affine=False))

    with torch.autocast("cpu", torch.bfloat16):
        expected = train(make, [5], "never")
        for mode in ("always", "except_last"):
            assert_equal(train(make, [2, 3], mode), expected)


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


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_knows_that_it_is_recomputing(mode: str) -> None:
    layers = build(Counts)
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [2, 3], 3, rematerialize=mode)
    pipeline.train_step(batch())
    assert [layers[1].count, layers[3].count] == [3, 3]
    pipeline.evaluate(batch()[0])
    assert [layers[1].count, layers[3].count] == [6, 6]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", NORMS)
def test_a_batch_norm_in_a_checkpoint_in_a_layer_counts_each_micro_batch_once(kind: str, mode: str) -> None:
    found = train(NORMS[kind], [2, 3], mode)
    assert_equal(found, train(NORMS[kind], [5], "never"))
    counters = [value for name, value in found.items() if name.endswith("num_batches_tracked")]
    assert counters and all(counter == 2 for counter in counters)


class Mask(nn.Module):
    """Adds a mask and a frozen table to the payload."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.table = nn.Parameter(torch.ones(SIZE), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.linspace(-1, 1, LENGTH * LENGTH).view(LENGTH, LENGTH)
        return {"main": self.linear(x), "mask": mask, "table": self.table * 2}


class Attend(nn.Module):
    """Uses them and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, payload: dict[str, Tensor]) -> dict[str, Tensor]:
        query, key, value = self.project(payload["main"])[:, None].chunk(3, -1)
        main = F.scaled_dot_product_attention(query, key, value, attn_mask=payload["mask"])[:, 0]
        return payload | {"main": payload["main"] + main * payload["table"]}


class Classify(nn.Module):
    """Ends the sequence."""

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        return payload["main"].flatten(1)[:, :3]


def attention() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Mask(), Attend(), Attend(), Classify())


def test_attention_with_a_mask_in_the_payload_has_the_same_bits_in_every_mode_and_cut() -> None:
    found = []
    for partitions, mode in (([4], "never"), ([4], "always"), ([1, 1, 2], "always"), ([2, 2], "never")):
        layers = attention()
        gpipe.Pipeline(layers, F.cross_entropy, partitions, 2, rematerialize=mode).train_step(batch())
        found.append([parameter.grad for parameter in layers.parameters() if parameter.requires_grad])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_constants_in_a_payload_get_no_gradient_and_none_travels_back(mode: str, monkeypatch: Any) -> None:
    pipeline = gpipe.Pipeline(attention(), F.cross_entropy, [1, 1, 1, 1], 2, rematerialize=mode)
    sent: list[list[bool]] = []
    send = pipeline.job.transfer.send

    def watch(task: Any, payload: Any) -> None:
        if task.kind == "forward":
            sent.append(payload.differentiable)
        else:
            sent.append([tensor is not None for tensor in payload.value()])
        send(task, payload)

    monkeypatch.setattr(pipeline.job.transfer, "send", watch)
    pipeline.train_step(batch(4))
    assert sent == [[True, False, False]] * 12  # three boundaries, two micro-batches, two directions


class Holds(torch.autograd.Function):
    """Keeps its input where hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_the_graph_of_a_forward_that_is_recomputed_is_gone_when_it_ends() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            nodes.append(torch._C._WeakTensorRef(y))
            return Holds.apply(y) * 3

    nodes: list[Any] = []
    alive: list[int] = []
    layers = nn.Sequential(nn.Linear(SIZE, SIZE), Layer(), nn.Sequential(nn.Flatten(), nn.Linear(24, 3)))
    layers[0].register_forward_hook(lambda *_: alive.append(sum(not node.expired() for node in nodes)))
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [3], 3)
    pipeline.train_step(batch())
    assert alive == [0] * 6


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
