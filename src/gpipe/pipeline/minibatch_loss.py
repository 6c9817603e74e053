"""The mini-batch's loss as a weighted sum of its micro-batches' losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe.pipeline.microbatch import split
from gpipe.pipeline.payload import Payload
from gpipe.pipeline.replicas import Replicas

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""(outputs, targets) of a micro-batch -> its mean loss, a scalar; or (loss, scalars by name) to be averaged alike."""

LossWeight = Callable[[Any], float]
"""Targets of a micro-batch -> how much its mean loss counts, such as its number of tokens."""


class MiniBatchLoss:
    """Computes the loss of one mini-batch, micro-batch by micro-batch, in the last stage.

    Args:
        function: the user's loss.
        weight: how much a micro-batch counts; None: by its number of examples.
        targets: of the mini-batch.
        sizes: examples of each micro-batch.
        device: where the outputs will be.
        replicas: whose mini-batches make up the whole one; None for one pipeline.

    Raises:
        ValueError: the weights are not positive in sum.
    """

    def __init__(
        self,
        function: LossFunction,
        weight: LossWeight | None,
        targets: Any,
        sizes: Sequence[int],
        device: torch.device,
        replicas: Replicas | None,
    ) -> None:
        self._function = function
        self._targets = split(targets, sizes)
        self._device = device
        self._replicas = replicas
        weights = [float(n) if weight is None else float(weight(t)) for n, t in zip(sizes, self._targets, strict=True)]
        totals = [sum(weights)] if replicas is None else replicas.gather(sum(weights))
        total = sum(totals)
        if not total > 0:
            raise ValueError(f"the loss weights of the mini-batch sum to {total}; at least one must be positive")
        self._weights = [w / total for w in weights]
        # The replicas' gradients are averaged, but the losses must add up.
        self._gradient_scale = len(totals)
        self._values: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}

    def __call__(self, outputs: Any, micro_batch: int) -> Tensor:
        """Return the micro-batch's share of the loss, to run backward from.

        Raises:
            TypeError: the loss function returned something else than a scalar.
        """
        targets = Payload.of(self._targets[micro_batch])
        targets.tensors = [tensor.to(self._device, non_blocking=True) for tensor in targets.tensors]
        result = self._function(outputs, targets.value())
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, Tensor) or loss.ndim > 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise TypeError(f"the loss has {found}; return one number, the mean over the micro-batch")
        self._values[micro_batch] = loss.detach(), {name: value.detach() for name, value in metrics.items()}
        return loss * (self._weights[micro_batch] * self._gradient_scale)

    def totals(self) -> dict[str, float]:
        """Return the mini-batch's loss under the name "loss", and its metrics; waits for the device once."""
        names = list(dict.fromkeys(name for _, metrics in self._values.values() for name in metrics))
        rows = [
            torch.stack([loss.double(), *(metrics[name].double() for name in names)])
            for _, (loss, metrics) in sorted(self._values.items())
        ]
        columns = zip(*torch.stack(rows).tolist(), strict=True)
        sums = [sum(w * value for w, value in zip(self._weights, column, strict=True)) for column in columns]
        if self._replicas is not None:
            sums = [sum(parts) for parts in zip(*self._replicas.gather(sums), strict=True)]
        return dict(zip(["loss", *names], sums, strict=True))
