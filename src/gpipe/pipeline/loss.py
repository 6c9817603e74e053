"""The mini-batch's loss as a weighted sum of its micro-batches' losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.pipeline.checks.loss_function import check_scalars, weigh
from gpipe.pipeline.checks.refusals import refuse_different, refuse_leaves_of_loss
from gpipe.pipeline.microbatch import Payload, split
from gpipe.pipeline.shared.replicas import Replicas

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""(outputs, targets) of a micro-batch -> its mean loss, a scalar; or (loss, scalars by name), all averaged alike."""

LossWeight = Callable[[Any], float]
"""Targets of a micro-batch -> the weight of its mean loss, such as its number of tokens."""


class MiniBatchLoss:
    """Computes the loss of one mini-batch, micro-batch by micro-batch, in the last stage.

    Args:
        weight: how much a micro-batch counts; None: its number of examples.
        sizes: the number of examples of each micro-batch.
        device: where the outputs will be.
        replicas: their mini-batches make up the whole one.
        given: the step's arguments that must be the same on every replica; "scaler.scale" also multiplies the loss.
        outputs: where to put the outputs of each micro-batch; None: nowhere.
        shards_replicas: whether the replicas exchange weights in each backward, so that none may skip one.

    Attributes:
        known: the parameters that the next loss may depend on; None: any.

    Raises:
        TypeError: a weight is not a number.
        ValueError: the sum of the weights is not positive, or another replica was given something else.
    """

    def __init__(
        self,
        function: LossFunction,
        weight: LossWeight | None,
        targets: Any,
        sizes: Sequence[int],
        device: torch.device,
        replicas: Replicas,
        given: Mapping[str, Any] | None = None,
        outputs: dict[int, Payload] | None = None,
        *,
        shards_replicas: bool = False,
    ) -> None:
        given = given or {}
        self._scale, self._outputs = given.get("scaler.scale") or 1.0, outputs
        self._shards_replicas = shards_replicas
        self.known: list[nn.Parameter] | None = None
        self._function, self._device, self._replicas = function, device, replicas
        self._targets = split(targets, sizes)
        weights = [
            float(n) if weight is None else weigh(weight, part.value())
            for n, part in zip(sizes, self._targets, strict=True)
        ]
        totals, of_all = zip(*replicas.gather([sum(weights), given]), strict=True)
        refuse_different(of_all, "replica {}")
        total = sum(totals)
        if not 0 < total < float("inf"):
            raise ValueError(f"the loss weights of the mini-batch sum to {total}; give finite ones, and one above 0")
        self._weights = [w / total for w in weights]
        self._values: dict[int, dict[str, Tensor]] = {}
        self._lacks_gradient = any(self._weights)  # until a micro-batch that counts has one

    def __call__(self, outputs: Any, micro_batch: int) -> Tensor:
        """Return the micro-batch's share of the loss, to run backward from.

        A micro-batch of weight 0, such as one of padding only, contributes nothing, even where its mean is 0 / 0.

        Raises:
            TypeError: the loss or a metric is not a scalar, or the loss is complex.
            ValueError: the metrics are not a dict, have one called "loss" or differ from those of another micro-batch;
                or the loss depends on something trainable that the pipeline would not train.
        """
        taken = Payload.of(outputs)
        if self._outputs is not None:
            self._outputs[micro_batch] = taken.detach()
        targets = self._targets[micro_batch].to(self._device)
        scalars = check_scalars(self._function(outputs, targets.value()))
        if self.known is not None:
            refuse_leaves_of_loss(scalars["loss"], taken, self.known)
            self.known = None
        if scalars.keys() != (known := next(iter(self._values.values()), scalars)).keys():
            raise ValueError(
                f"the loss returned the metrics {[*scalars][1:]}, but {[*known][1:]} for another micro-batch; return "
                "the same ones each time"
            )
        if self._weights[micro_batch] == 0:
            scalars = {name: torch.zeros_like(value) for name, value in scalars.items()}
            if self._shards_replicas:  # the sum of no numbers: 0, with a gradient of zeros
                wanted = [tensor for tensor in taken.tensors if tensor.requires_grad]
                scalars["loss"] = sum((tensor.flatten()[:0].sum() for tensor in wanted), scalars["loss"])
        self._values[micro_batch] = {name: value.detach() for name, value in scalars.items()}
        # The replicas' gradients are averaged, but their losses must add up.
        share: Tensor = scalars["loss"] * (self._weights[micro_batch] * self._replicas.count * self._scale)
        if self._lacks_gradient and self._weights[micro_batch] != 0:
            self._lacks_gradient = any(taken.differentiable) and not share.requires_grad
        return share

    def refuse_without_gradient(self) -> None:
        """Refuse a loss that gave no output a gradient in any micro-batch: nothing would be trained."""
        if self._lacks_gradient:
            raise ValueError(
                "the loss has no gradient with respect to the outputs, so nothing would be trained; do not detach "
                "them, and use differentiable operations"
            )

    def totals(self) -> dict[str, float]:
        """Return this replica's share of the loss, as "loss", and of the metrics; wait for the device once."""
        names = list(next(iter(self._values.values())))
        rows = [
            torch.stack([scalars[name].to(self._device, torch.float64) for name in names])
            for _, scalars in sorted(self._values.items())
        ]
        columns = zip(*torch.stack(rows).tolist(), strict=True)
        sums = [sum(w * value for w, value in zip(self._weights, column, strict=True)) for column in columns]
        return dict(zip(names, sums, strict=True))


def add_up(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mini-batch's loss and metrics from the shares of all replicas, which must have the same metrics."""
    refuse_different([{"the list of metrics": [*share][1:]} for share in shares], "replica {}")
    return {name: sum(share[name] for share in shares) for name in shares[0]}
