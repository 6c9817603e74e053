"""The micro-batches' weighted losses add up to the mini-batch's, and a wrong loss is refused in a sentence."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.loss import LossFunction, LossWeight, MiniBatchLoss
from gpipe.pipeline.shared.replicas import Replicas

PADDING = -1


def minibatch_loss(
    function: LossFunction, targets: Any, sizes: Sequence[int], weight: LossWeight | None = None
) -> MiniBatchLoss:
    return MiniBatchLoss(function, weight, targets, sizes, torch.device("cpu"), Replicas())


def num_tokens(targets: Tensor) -> int:
    return int((targets != PADDING).sum())


def token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean over the tokens that are no padding: 0 / 0 where all are."""
    loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)
    return loss, {"double": 2 * loss}


def run(loss: MiniBatchLoss, outputs: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run backward from each part and return the gradient of the outputs."""
    outputs = outputs.clone().requires_grad_()
    parts = [loss(part, i) for i, part in enumerate(outputs.split(list(sizes)))]
    sum(part for part in parts if part.requires_grad).backward()
    assert outputs.grad is not None
    return outputs.grad


def test_uneven_parts_count_by_their_examples() -> None:
    outputs, targets = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 3
    loss = minibatch_loss(F.cross_entropy, targets, [3, 3, 1])
    gradient = run(loss, outputs, [3, 3, 1])
    whole = outputs.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets)
    expected.backward()
    assert math.isclose(loss.totals()["loss"], expected.item(), rel_tol=1e-14)
    torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=1e-15)


def test_tokens_count_alike_wherever_the_padding_is() -> None:
    outputs = torch.randn(5, 4, 3, dtype=torch.float64)
    targets = torch.randint(3, (5, 4))
    targets[0, 1:], targets[2] = PADDING, PADDING  # the second part has padding only
    loss = minibatch_loss(token_loss, targets, [2, 1, 2], num_tokens)
    gradient = run(loss, outputs, [2, 1, 2])
    whole = outputs.clone().requires_grad_()
    expected, _ = token_loss(whole, targets)
    expected.backward()
    totals = loss.totals()
    assert math.isclose(totals["loss"], expected.item(), rel_tol=1e-14)
    assert math.isclose(totals["double"], 2 * expected.item(), rel_tol=1e-14)
    torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=1e-15)


CLASS_WEIGHTS = torch.tensor([0.5, 3.0, 1.25], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(CLASS_WEIGHTS),
        nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.25),
        F.nll_loss,
        nn.NLLLoss(CLASS_WEIGHTS, ignore_index=1),
    ],
    ids=["cross_entropy", "all", "ignored", "weights", "weights, smooth", "nll_loss", "NLLLoss, weights, ignored"],
)
@pytest.mark.parametrize("num_targets", [1, 3])
def test_torchs_cross_entropies_are_those_of_the_whole_mini_batch(loss: Any, num_targets: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv1d(4, 3, 1), nn.LogSoftmax(1)).double()
    inputs, targets = torch.randn(9, 4, num_targets, dtype=torch.float64), torch.randint(3, (9, num_targets))
    targets[3:5] = targets[7] = getattr(loss, "ignore_index", -100)  # the second of four micro-batches has none left
    check_whole_mini_batch(layers, loss, inputs, targets)


def test_probabilities_of_classes_all_count() -> None:
    targets = torch.rand(9, 3, dtype=torch.float64).softmax(1)
    for loss in (nn.CrossEntropyLoss(CLASS_WEIGHTS), F.cross_entropy):
        layers = nn.Sequential(nn.Linear(4, 3)).double()
        check_whole_mini_batch(layers, loss, torch.randn(9, 4, dtype=torch.float64), targets)


def check_whole_mini_batch(layers: nn.Sequential, loss: Any, inputs: Tensor, targets: Tensor) -> None:
    whole = copy.deepcopy(layers)
    expected = loss(whole(inputs), targets)
    expected.backward()
    report = gpipe.Pipeline(layers, loss, [1] * len(layers), 4).train_step((inputs, targets))
    assert report.loss == pytest.approx(expected.item(), rel=1e-14)
    for parameter, wanted in zip(layers.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=0, atol=1e-15)


def test_metrics_are_averaged_as_the_loss_is_and_keep_their_order() -> None:
    def function(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        many = torch.tensor(2**24 + 1)  # no number of float32
        return outputs.mean(), {"second": (targets == 1).float().mean(), "first": outputs.max(), "many": many}

    loss = minibatch_loss(function, torch.tensor([1, 0, 1]), [2, 1])
    for i, part in enumerate(torch.tensor([1.0, 2.0, 6.0]).split([2, 1])):
        loss(part, i)
    totals = loss.totals()
    assert totals.pop("many") == pytest.approx(2**24 + 1, rel=1e-12)
    assert totals == pytest.approx({"loss": 3.0, "second": 2 / 3, "first": (2 * 2.0 + 6.0) / 3})
    assert list(totals) == ["loss", "second", "first"]


def test_parts_may_come_in_any_order() -> None:
    loss = minibatch_loss(lambda outputs, _: outputs.mean(), torch.zeros(3), [2, 1])
    for i, part in reversed(list(enumerate(torch.tensor([1.0, 2.0, 6.0]).split([2, 1])))):
        loss(part, i)
    assert loss.totals() == {"loss": 3.0}


def test_targets_may_be_nested() -> None:
    loss = minibatch_loss(
        lambda outputs, t: (outputs * t["w"][0]).mean(), {"w": [torch.tensor([2.0, 3.0]), None]}, [1, 1]
    )
    assert [float(loss(torch.ones(1), i)) for i in (0, 1)] == [1.0, 1.5]


@pytest.mark.parametrize(
    ("weigh", "total"), [(num_tokens, 0.0), (lambda _: math.nan, math.nan), (lambda _: math.inf, math.inf)]
)
def test_weights_that_sum_to_nothing_are_refused(weigh: LossWeight, total: float) -> None:
    with pytest.raises(ValueError, match=rf"^the loss weights of the mini-batch sum to {total}; give finite ones, and"):
        minibatch_loss(token_loss, torch.full((2, 3), PADDING), [1, 1], weigh)


SCALAR = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), "the loss has the shape (3,); return one number"),
        (2.5, "the loss has the type float; return one number"),
        (None, "the loss has the type NoneType; return one number"),
        ((SCALAR, SCALAR, SCALAR), "the loss has the type tuple; return one number"),
        ((SCALAR, SCALAR), "the loss came with metrics of type Tensor; return (loss, {name: scalar})"),
        ((SCALAR, {"loss": SCALAR}), "the loss came with a metric called 'loss'; return (loss, {name: scalar})"),
        ((SCALAR, {"top1": 0.5}), "the metric 'top1' has the type float; return a scalar tensor"),
        ((SCALAR, {"top1": torch.zeros(2)}), "the metric 'top1' has the shape (2,); return a scalar tensor"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(result: Any, message: str) -> None:
    loss = minibatch_loss(lambda outputs, targets: result, torch.zeros(1), [1])
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        loss(torch.zeros(1), 0)


def test_other_metrics_in_another_micro_batch_are_refused() -> None:
    loss = minibatch_loss(lambda outputs, targets: (SCALAR, {str(len(targets)): SCALAR}), torch.zeros(3), [2, 1])
    loss(torch.zeros(2), 0)
    with pytest.raises(ValueError, match=r"^the loss returned the metrics \['1'\], but \['2'\] for another"):
        loss(torch.zeros(1), 1)


def test_a_mini_batch_of_which_one_replica_has_padding_alone_is_no_loss_without_a_gradient() -> None:
    targets = torch.full((2, 3), PADDING)
    replicas = Replicas()
    replicas.gather = lambda value: [value, [1.0, value[1]]]  # type: ignore[method-assign]  # the other one has a token
    loss = MiniBatchLoss(token_loss, num_tokens, targets, [1, 1], torch.device("cpu"), replicas)
    outputs = torch.randn(2, 3, 5, requires_grad=True)
    assert [float(loss(part, i)) for i, part in enumerate(outputs.split(1))] == [0.0, 0.0]
    loss.refuse_without_gradient()


def test_replicas_that_share_out_weights_run_the_backward_of_padding_too() -> None:
    targets = torch.tensor([[PADDING, PADDING], [1, 2]])
    outputs = torch.randn(2, 2, 5)
    outputs[0] = torch.inf  # 0 times this is no number
    outputs.requires_grad_()
    loss = MiniBatchLoss(token_loss, num_tokens, targets, [1, 1], torch.device("cpu"), Replicas(), shards_replicas=True)
    first, _ = (loss(part, i) for i, part in enumerate(outputs.split(1)))
    first.backward()
    assert first.item() == 0.0 and torch.equal(outputs.grad, torch.zeros(2, 2, 5))
