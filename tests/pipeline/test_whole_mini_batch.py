"""What belongs to a mini-batch as a whole: tensors that are not cut by examples, outputs, the loss of an evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.schedule import Kind, Rematerialize, StepSchedule, Task
from gpipe.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")
PARTITIONS = ([3], [1, 2], [1, 1, 1])
TIME, BATCH, WIDTH = 5, 7, 8


class Attend(nn.Module):
    """Attention over time-first tensors with a causal mask that travels along."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2)

    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = payload
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0], mask


class Head(nn.Module):
    """Drops the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, payload: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(payload[0])


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Attend(), Attend(), Head()).double()


def mini_batch() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TIME, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.full((TIME, TIME), float("-inf"), dtype=torch.float64).triu(1)
    targets = torch.randint(3, (TIME, BATCH), generator=generator)
    return (gpipe.split_along(x, 1), gpipe.replicated(mask)), gpipe.split_along(targets, 1)


def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    right = (outputs.argmax(-1) == targets).double().mean()
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten()), {"accuracy": right}


def plain(layers: nn.Module) -> Tensor:
    (x, mask), _ = mini_batch()
    outputs: Tensor = layers((x.tensor, mask.tensor))
    return outputs


def pipeline_of(layers: nn.Sequential, partitions: Any = (1, 2), **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, loss, partitions, 3, output_dimension=1, **options)


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("mode", MODES)
def test_time_first_tensors_and_a_mask_give_the_plain_models_gradients(partitions: list[int], mode: str) -> None:
    layers = build().eval()  # dropout would be drawn per micro-batch
    expected = copy.deepcopy(layers)
    total, _ = loss(plain(expected), mini_batch()[1].tensor)
    total.backward()
    report = pipeline_of(layers, partitions, rematerialize=mode).train_step(mini_batch())
    assert report.loss == pytest.approx(total.item(), abs=1e-12)
    for (name, parameter), other in zip(layers.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("partitions", PARTITIONS)
@pytest.mark.parametrize("mode", MODES)
def test_with_dropout_the_number_of_stages_and_the_mode_change_no_bit(partitions: list[int], mode: str) -> None:
    expected, found = build(), build()
    one = pipeline_of(expected, [3], rematerialize="never").train_step(mini_batch(), return_outputs=True)
    other = pipeline_of(found, partitions, rematerialize=mode).train_step(mini_batch(), return_outputs=True)
    assert one.loss == other.loss and torch.equal(one.outputs, other.outputs)
    for (name, parameter), twin in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad), name


@pytest.mark.parametrize("mode", MODES)
def test_the_outputs_of_a_step_are_those_of_the_plain_model(mode: str) -> None:
    layers = build().eval()
    report = pipeline_of(layers, rematerialize=mode).train_step(mini_batch(), return_outputs=True)
    torch.testing.assert_close(report.outputs, plain(layers), rtol=0, atol=1e-13)
    assert not report.outputs.requires_grad
    assert pipeline_of(layers).train_step(mini_batch()).outputs is None


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_an_evaluation_with_targets_gives_the_loss_and_metrics_of_the_plain_model(partitions: list[int]) -> None:
    layers = build()
    pipeline = pipeline_of(layers, partitions)
    inputs, targets = mini_batch()
    found = pipeline.evaluate(inputs, targets)
    expected, metrics = loss(plain(layers.eval()), targets.tensor)
    assert found == pytest.approx({"loss": expected.item(), "accuracy": metrics["accuracy"].item()}, abs=1e-12)
    assert all(parameter.grad is None for parameter in layers.parameters())
    with pytest.raises(ValueError, match="the targets have no tensor"):
        pipeline.evaluate(inputs, None)


def test_what_a_users_function_measures_comes_micro_batch_by_micro_batch() -> None:
    layers = build()
    inputs, targets = mini_batch()
    found = pipeline_of(layers).measure(inputs, targets, lambda outputs, part: (outputs.shape, outputs.sum() + part[0]))
    assert [shape for shape, _ in found] == [(TIME, 3, 3), (TIME, 2, 3), (TIME, 2, 3)]
    outputs = plain(layers.eval())
    parts = zip(outputs.split([3, 2, 2], 1), targets.tensor.split([3, 2, 2], 1), strict=True)
    for (_, value), (part, own) in zip(found, parts, strict=True):
        torch.testing.assert_close(value, part.sum() + own[0], rtol=0, atol=1e-12)


def test_an_error_in_a_users_function_is_placed() -> None:
    inputs, targets = mini_batch()
    with pytest.raises(ZeroDivisionError, match=r"^stage 1, micro-batch 0, the loss, loss: ZeroDivisionError: "):
        pipeline_of(build()).measure(inputs, targets, lambda *_: 1 / 0)


class ChangeMask(nn.Module):
    def forward(self, payload: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        payload[1].mul_(2)
        return payload


@pytest.mark.parametrize("mode", MODES)
def test_a_change_of_what_all_micro_batches_share_is_refused(mode: str) -> None:
    layers = nn.Sequential(ChangeMask(), *build()[1:])
    with pytest.raises(ValueError, match=r"shares memory with another one, .* the same tensor of another micro-batch;"):
        pipeline_of(layers, rematerialize=mode).train_step(mini_batch())


def test_outputs_need_the_dimension_that_they_are_put_together_along() -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Identity()), F.mse_loss, [1], 2, output_dimension=1)
    with pytest.raises(ValueError, match=r"^an output has the shape \(2,\) .* concatenated along dimension 1, so it"):
        pipeline.evaluate(torch.zeros(4))
    with pytest.raises(ValueError, match=r"^output_dimension is -1; it must be a whole number of at least 0$"):
        gpipe.Pipeline(nn.Sequential(nn.Identity()), F.mse_loss, [1], 2, output_dimension=-1)


def hurried(num_stages: int, num_microbatches: int, mode: Rematerialize, stages_per_device: int) -> StepSchedule:
    """A user's schedule: one micro-batch after the other, each recomputed at once whatever the mode."""
    del mode, stages_per_device
    kinds = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
    return [[Task(kind, k, m) for m in range(num_microbatches) for kind in kinds] for k in range(num_stages)]


def train_in_a_process(rank: int) -> tuple[Any, ...]:
    from tests.pipeline.wire.mixed_layers import stages

    layers = build()
    pipeline = pipeline_of(layers, [1, 2], mesh=stages(2), schedule=hurried, timeout_seconds=20)
    report = pipeline.train_step(mini_batch(), return_outputs=True)
    inputs, targets = mini_batch()
    figures = pipeline.evaluate(inputs if rank == 0 else None, targets if rank == 1 else None)
    outputs = None if report.outputs is None else report.outputs.tolist()
    gradients = {name: parameter.grad.tolist() for name, parameter in pipeline.named_parameters()}
    measured = pipeline.measure(inputs, targets, lambda logits, _: logits.sum().item())
    pipeline.close()
    return figures, outputs, gradients, measured


def test_in_two_processes_all_of_it_is_the_same(processes: ProcessPool) -> None:
    first, last = processes.run(2, train_in_a_process)
    layers = build()
    pipeline = pipeline_of(layers, [3], schedule=hurried)
    report = pipeline.train_step(mini_batch(), return_outputs=True)
    inputs, targets = mini_batch()
    assert first[0] == last[0] == pipeline.evaluate(inputs, targets)
    assert (first[1], last[1]) == (None, report.outputs.tolist())
    assert first[2] | last[2] == {name: p.grad.tolist() for name, p in pipeline.named_parameters()}
    assert (first[3], last[3]) == (None, pipeline.measure(inputs, targets, lambda logits, _: logits.sum().item()))


def test_a_users_schedule_has_the_gradients_of_1f1b_which_adds_up_in_the_same_order() -> None:
    found, expected = build(), build()
    pipeline_of(found, schedule=hurried).train_step(mini_batch())
    pipeline_of(expected, schedule="1f1b").train_step(mini_batch())
    for (name, parameter), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_a_users_schedule_is_checked_again_for_a_mini_batch_of_fewer_micro_batches() -> None:
    def forgetful(num_stages: int, num_microbatches: int, mode: Rematerialize, per_device: int) -> StepSchedule:
        schedule = one_forward_one_backward(num_stages, num_microbatches, mode, per_device)
        return schedule if num_microbatches == 3 else [tasks[:-1] for tasks in schedule]

    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(1, 1)), F.mse_loss, [1], 3, schedule=forgetful)
    pipeline.train_step((torch.zeros(3, 1), torch.zeros(3, 1)))
    with pytest.raises(
        ValueError, match=r"^the schedule has forward, recompute for stage 0, micro-batch 1; it must be"
    ):
        pipeline.train_step((torch.zeros(2, 1), torch.zeros(2, 1)))
