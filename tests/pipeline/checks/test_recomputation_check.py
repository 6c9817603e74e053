"""A recomputation that gives something else than its forward is found, and its layer named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.checks.recomputation_check import RecomputationCheck

MODES = ("always", "except_last", "never")


class Scales(nn.Module):
    """Multiplies by the number of its forwards, from one of them on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.count = first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * max(1, self.count - self.first)


class Halves(nn.Module):
    """Returns parts, of which one is complex and not yet conjugated, one of integers, and one without elements."""

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        parts = {"complex": torch.complex(x, x).conj(), "integers": (x > 0).long(), "none": None, "same": x}
        return {**parts, "empty": x[:, :0]}


class First(nn.Module):
    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["complex"].real + parts["same"]


def train(layers: nn.Sequential, partitions: list[int], mode: str) -> gpipe.Pipeline:
    pipeline = gpipe.Pipeline(layers, F.mse_loss, partitions, 3, rematerialize=mode, check_recomputation=True)
    for _ in range(2):
        pipeline.train_step((torch.randn(6, 4), torch.randn(6, 4)))
    pipeline.evaluate(torch.randn(6, 4))
    return pipeline


@pytest.mark.parametrize("mode", MODES)
def test_layers_as_they_should_be_pass(mode: str) -> None:
    layers = gpipe.convert_batch_norm(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Halves(), First(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    )
    train(layers, [3, 3], mode)


# The forwards of three micro-batches come first; the recomputation of the last one is the fourth.
@pytest.mark.parametrize(("mode", "first", "micro_batch"), [("always", 2, 2), ("except_last", 2, 1), ("always", 3, 1)])
def test_a_layer_that_depends_on_what_ran_before_is_named(mode: str, first: int, micro_batch: int) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Scales(first), nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(gpipe.PipelineError) as error:
        train(layers, [1, 3, 1], mode)
    message = str(error.value)
    assert message.startswith(f"stage 1, micro-batch {micro_batch}, layer 2 (Scales), recompute: ValueError: the ")
    assert "set rematerialize='never'" in message
    assert (error.value.stage, error.value.micro_batch, error.value.layer) == (1, micro_batch, 2)


def test_a_step_that_failed_is_forgotten() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if bool(targets.isnan().any()):
            raise OSError
        return F.mse_loss(outputs, targets)

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, loss, [1, 1], 3, rematerialize="except_last", check_recomputation=True)
    with pytest.raises(gpipe.PipelineError):
        pipeline.train_step((torch.randn(6, 4), torch.full((6, 4), torch.nan)))
    pipeline.train_step((torch.randn(2, 4), torch.randn(2, 4)))  # whose last one was not that step's


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex128])
def test_equal_bits_in_other_places_are_something_else(dtype: torch.dtype) -> None:
    outputs = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).to(dtype)
    check = RecomputationCheck()
    for changed in (outputs.flip(0), outputs.flip(1), outputs[:1], ~outputs if dtype is torch.bool else 2 * outputs):
        check.note(0, 0, [outputs])
        check.compare(0, 0, [outputs.clone()])
        check.note(0, 0, [outputs])
        with pytest.raises(ValueError, match="deterministic"):
            check.compare(0, 0, [changed])


def test_without_the_check_nothing_is_compared() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Scales(0), nn.Linear(4, 4))
    gpipe.Pipeline(layers, F.mse_loss, [2, 1], 3).train_step((torch.randn(6, 4), torch.randn(6, 4)))
