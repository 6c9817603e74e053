"""A micro-batch that runs again computes the same bits, asks for the same gradients, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from tests.pipeline.recomputed_layers import MODES, NORMS, OTHERS, STATEFUL, Counts, assert_equal, batch, build, train
from tests.support.layer_zoo import LENGTH, SIZE


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
