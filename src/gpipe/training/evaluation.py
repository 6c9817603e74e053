"""Evaluate a pipeline on a whole data set: loss and accuracies, exact for batches of uneven sizes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.pipeline.engine import Pipeline
from gpipe.training.cross_entropy import choose_ranks, find_labelled, judge
from gpipe.training.loader import Loader, iterate

_IGNORED = -100  # the default of torch's cross_entropy


@runtime_checkable
class Metrics(Protocol):
    """Measures the micro-batches of an evaluation set on the process that has the outputs; it has no state."""

    def measure(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sums of a micro-batch, given the model's outputs: float64, always of the same shape."""

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return the figures, at least "loss", given the sum of all batches' sums.

        "<part>/<figure>" is the figure of a part of the set.
        """


class EvaluationMetrics:
    """Mean loss and accuracies over all targets, images or tokens, independent of the batches."""

    @torch.no_grad()
    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the number of targets, their loss, and how many are in the top 1 and, from 5 classes up, the top 5.

        Args:
            logits: [..., classes]; the sums stay on their device.
            targets: class indices [...], on any device; those of -100 do not count.
        """
        if not _are_classes(logits, targets):
            raise TypeError(
                f"the outputs are {_describe(logits)} and the targets {_describe(targets)}, but without metrics=... an "
                "evaluation expects the scores of classes [..., classes] and their indices [...]: give your own "
                "metrics, or no evaluation set."
            )
        targets = targets.to(logits.device, non_blocking=True)  # a blocking copy would wait for the GPU
        counts = targets != _IGNORED
        # Without label smoothing: the evaluation loss is the likelihood of the data, comparable between recipes.
        found = judge(logits, targets.where(counts, 0), ranks=choose_ranks(logits.shape[-1]))
        counts = counts.flatten()
        return torch.stack([v.double().where(counts, 0).sum() for v in (counts, found.losses, *found.correct)])

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return the mean loss, in nats, and the fractions top1 and, with 5 classes or more, top5."""
        num_targets, *totals = sums.tolist()
        if not num_targets:
            raise ValueError("the evaluation set gave 0 targets, expected 1 or more: check its data.")
        return {name: total / num_targets for name, total in zip(("loss", "top1", "top5"), totals, strict=False)}


def _are_classes(logits: Any, targets: Any) -> bool:
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)):
        return False
    return logits.shape[:-1] == targets.shape and logits.is_floating_point() and not targets.is_floating_point()


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


class MultiLabelMetrics:
    """Mean loss and accuracies of images with several labels each, independent of the batches."""

    @torch.no_grad()
    def measure(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sums over images: their number, loss, "top1", and labels found, predicted and present.

        Args:
            logits: [n, classes]; a class is predicted if its probability is one half or more.
            targets: 0 or 1, float [n, classes], on any device.
        """
        targets = targets.to(logits.device, torch.float32, non_blocking=True)
        losses = F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").mean(1)
        predicted = (logits >= 0).double()
        return torch.stack(
            [
                torch.full((), len(targets), dtype=torch.float64, device=logits.device),
                losses.double().sum(),
                find_labelled(logits, targets).double().sum(),
                (predicted * targets).sum(),
                predicted.sum(),
                targets.double().sum(),
            ]
        )

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return the mean loss, "top1" as in `MultiLabelLoss`, and "f1".

        "f1" is the harmonic mean of precision and recall, over all labels of all images.
        """
        num_images, loss, right, found, predicted, present = sums.tolist()
        return {
            "loss": loss / num_images,
            "top1": right / num_images,
            "f1": 2 * found / (predicted + present) if predicted + present else 1.0,
        }


class TokenMetrics:
    """Loss and token accuracy per language, and their averages over languages.

    Within a language, every target token except padding has the same weight. In the average, every language that has
    tokens has the same weight, as in the paper: the few sentences of a low-resource language count as much as the many
    of another.

    Args:
        languages: the names, in the order of the targets' language numbers.
        padding_index: the token that pads the targets.
    """

    def __init__(self, languages: Sequence[str], padding_index: int = 1) -> None:
        self._languages = tuple(languages)
        self._padding_index = padding_index

    @torch.no_grad()
    def measure(self, logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return [languages, 3]: the number of tokens per language, their loss, and how many were predicted right.

        Args:
            logits: [batch, time, vocabulary].
            targets: "tokens" [batch, time] and "language" [batch].
        """
        tokens = targets["tokens"].to(logits.device, non_blocking=True)
        counts = tokens != self._padding_index
        # Without label smoothing: the evaluation loss is the likelihood of the data, comparable between recipes.
        found = judge(logits, tokens)
        losses, right = found.losses.view_as(tokens), found.correct[0].view_as(tokens)
        rows = torch.stack([(values * counts).double().sum(1) for values in (counts, losses, right)], dim=1)
        sums = torch.zeros(len(self._languages), 3, dtype=torch.float64, device=logits.device)
        return sums.index_add(0, targets["language"].to(logits.device, non_blocking=True), rows)

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return "<language>/loss", in nats per token, and "<language>/top1", and their means over the languages."""
        rows = zip(self._languages, sums.tolist(), strict=True)
        found = {name: (loss / count, right / count) for name, (count, loss, right) in rows if count}
        if not found:
            raise ValueError("the evaluation set gave 0 tokens: check its split and its languages.")
        loss, top1 = (fmean(column) for column in zip(*found.values(), strict=True))
        losses = {f"{name}/loss": value for name, (value, _) in found.items()}
        return {"loss": loss, "top1": top1, **losses, **{f"{name}/top1": value for name, (_, value) in found.items()}}


def evaluate_on_all(
    pipeline: Pipeline,
    loaders: Mapping[str, Loader],
    averages: nn.ModuleDict | None,
    metrics: Metrics,
    *,
    raw: bool = True,
    max_batches: int | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[nn.ModuleDict | None], None] = lambda _: None,
) -> dict[str, dict[str, float]]:
    """Return the figures of each evaluation set by its name; every process calls it.

    The layers' averages are evaluated in their place if there are any. With `raw`, the layers themselves are evaluated
    beside them, as "raw_<figure>". `autocast` creates the context of the forward passes. `prepare` is called before
    each model is evaluated, with its layers; None means the pipeline's own.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in loaders}
    for prefix, layers in {"": averages, "raw_": None}.items() if averages is not None and raw else [("", averages)]:
        prepare(layers)
        for name, loader in loaders.items():
            with autocast():
                figures = evaluate(pipeline, loader, layers, metrics, max_batches)
            is_main = prefix == ""
            found[name] |= {prefix + key: value for key, value in figures.items() if is_main or "/" not in key}
    return found


def evaluate(
    pipeline: Pipeline,
    loader: Loader,
    layers: nn.ModuleDict | None = None,
    metrics: Metrics | None = None,
    max_batches: int | None = None,
) -> dict[str, float]:
    """Return the figures over a whole data set, bitwise the same on every process and for every number of replicas.

    Every process calls it. Replica r of R takes every R-th of the chosen mini-batches, from the r-th on. Their sums are
    added in the order of the mini-batches, as if one replica had taken them all.

    Args:
        pipeline: the pipeline to evaluate.
        loader: the same on every process.
        layers: evaluated in place of the pipeline's own, such as their moving average.
        metrics: EvaluationMetrics by default.
        max_batches: the most mini-batches to evaluate, chosen by `choose_batches`; None means all.

    Raises:
        ValueError: the loader yields no mini-batch, or not as many as chosen; or there is no target.
    """
    metrics = metrics or EvaluationMetrics()
    loader.set_epoch(0)
    chosen = choose_batches(len(loader), max_batches)
    loader.batch_numbers = chosen[pipeline.job.replica_index :: pipeline.job.num_replicas]
    sums: list[Tensor] = []
    for inputs, targets in iterate(loader, pipeline):
        parts = pipeline.measure(inputs, targets, metrics.measure, layers=layers)
        if parts is not None:
            sums.append(torch.stack(parts).sum(0))
    own = [one.tolist() for one in sums] if pipeline.is_last else None
    shares = [share for share in pipeline.job.gather_all(own) if share is not None]
    num_given, num_expected = sum(map(len, shares)), max(1, len(chosen))
    if num_given != num_expected:
        raise ValueError(
            f"the evaluation set gave {num_given} mini-batches, expected {num_expected}: check its split, and what its "
            "loader yields."
        )
    rows = [shares[number % len(shares)][number // len(shares)] for number in range(num_given)]
    return metrics.compute(torch.tensor(rows, dtype=torch.float64).sum(0))


def choose_batches(num_batches: int, max_batches: int | None) -> Sequence[int]:
    """Return the numbers of the mini-batches to evaluate, at most `max_batches`, spread evenly over the whole set.

    A set may be sorted by class or by the length of sentences, so its first mini-batches do not represent it.

        0 1 2 3 4 5 6 7 8 9     max_batches
          x       x     x       3
          x   x     x   x       4
        x x x x   x x x x x     9
    """
    if max_batches is None or max_batches >= num_batches:
        return range(num_batches)
    return [(2 * part + 1) * num_batches // (2 * max_batches) for part in range(max_batches)]  # the middle of each part
