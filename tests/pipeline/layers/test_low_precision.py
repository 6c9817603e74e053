"""Under autocast, what the next layer converts travels converted: half the bytes, for every cut the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.layers.low_precision import wants_low_precision
from gpipe.pipeline.microbatch import Payload

MODES = ("always", "except_last", "never")


class Residual(nn.Module):
    """Adds a branch to its input, which it uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6))

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = value + self.branch(value)
        return output


class Norm(nn.LayerNorm):
    """Returns float32, as torch's does on a GPU under autocast."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.float())


def build(*, wanted: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            Norm(4), nn.Linear(4, 6), Norm(6), Residual(), Norm(6), Residual(), Norm(6), nn.Linear(6, 3)
        )
    for layer in layers:
        if isinstance(layer, Residual):
            layer.wants_low_precision = wanted  # type: ignore[assignment]
    return layers


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def train(layers: nn.Sequential, partitions: list[int], num_microbatches: int, mode: str) -> list[tuple[str, Any, Any]]:
    """Make a step; return what travelled over each boundary: the direction, the type and the number of bytes."""
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, num_microbatches, rematerialize=mode)
    sent, send = [], pipeline.job.transfer.send

    def watch(task: Any, payload: Payload) -> None:
        sent.append((task.kind.direction.name, payload.tensors[0].dtype, payload.tensors[0].nbytes))
        send(task, payload)

    pipeline.job.transfer.send = watch  # type: ignore[method-assign]
    with torch.autocast("cpu", torch.bfloat16):
        pipeline.train_step(batch())
    return sent


@pytest.mark.parametrize("mode", MODES)
def test_before_a_linear_layer_half_travels_with_the_bits_of_the_plain_model(mode: str) -> None:
    layers, plain = build(), build()
    sent = train(layers, [1, 6, 1], 1, mode)
    # 8 rows of 4 before the first, of 6 before the second
    assert sorted(sent, key=str) == sorted(
        [(to, torch.bfloat16, 8 * width * 2) for to in ("FORWARD", "BACKWARD") for width in (4, 6)], key=str
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(plain(batch()[0]), batch()[1])
    loss.backward()
    for (name, found), expected in zip(layers.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert torch.equal(found.grad, expected.grad), name


@pytest.mark.parametrize("wanted", [False, True])
def test_another_layer_gets_low_precision_for_every_cut_if_it_says_so(wanted: bool) -> None:
    expected: list[Any] = []
    sent: list[tuple[str, Any, Any]] = []
    for partitions, mode in (([8], "never"), ([3, 2, 3], "always"), ([1, 2, 2, 3], "except_last")):
        layers = build(wanted=wanted)
        sent += train(layers, partitions, 3, mode)
        found = [parameter.grad for parameter in layers.parameters()]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), partitions
    types = {dtype for _, dtype, _ in sent}
    assert types == ({torch.bfloat16} if wanted else {torch.bfloat16, torch.float32})


def test_without_autocast_nothing_is_converted() -> None:
    layers = build(wanted=True)
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, [1, 2, 5], 2)
    pipeline.train_step(batch())
    plain = build()
    outputs = pipeline.evaluate(batch()[0])
    # Micro-batch by micro-batch: some processors multiply a taller matrix in another order.
    assert torch.equal(outputs, torch.cat([plain(part) for part in batch()[0].chunk(2)]))


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda _, args: args)
    return layer


class Scaled(nn.Linear):
    """Scales its input before it converts it."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(3 * value)


def test_only_layers_that_convert_first_are_taken_to_want_it() -> None:
    said = Residual()
    said.wants_low_precision = True  # type: ignore[assignment]
    refused = nn.Linear(2, 2)
    refused.wants_low_precision = False  # type: ignore[assignment]
    wanting = [nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), said]
    others = [
        *(nn.ReLU(), nn.LayerNorm(2), Residual(), Scaled(2, 2), refused, with_hook(nn.Linear(2, 2)), nn.Sequential()),
        *(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), with_hook(nn.Sequential(nn.Linear(2, 2)))),
    ]
    assert all(map(wants_low_precision, wanting))
    assert not any(map(wants_low_precision, others))
    assert wants_low_precision(copy.deepcopy(said))
