"""Evaluate a pipeline on a whole data set."""

import torch
from torch import Tensor, nn

from gpipe.pipeline.engine import Pipeline
from gpipe.training.loader import Loader, loaded
from gpipe.training.metrics import EvaluationMetrics, Metrics


def evaluate(
    pipeline: Pipeline, loader: Loader, layers: nn.ModuleDict | None = None, metrics: Metrics | None = None
) -> dict[str, float]:
    """Return the figures of `metrics` over all of `loader`, the same on every process, to the last bit for every R.

    Every process calls it, with the same loader. `layers` are evaluated in place of the pipeline's own, such as their
    moving average. Replica r of R takes the mini-batches r, r + R, ...; the sums of each are added up in the order of
    the mini-batches, as if one replica had taken them all. Raises ValueError where there is none.
    """
    metrics = metrics or EvaluationMetrics()
    loader.set_epoch(0)
    loader.start_batch, loader.stride = min(pipeline.job.replica_index, len(loader)), pipeline.job.num_replicas
    sums: list[Tensor] = []
    for inputs, targets in loaded(loader, pipeline):
        outputs = pipeline.evaluate(inputs, layers=layers)
        if pipeline.is_last:
            sums.append(metrics.measure(outputs, targets))
    own = [one.tolist() for one in sums] if pipeline.is_last else None
    shares = [share for share in pipeline.job.gather_all(own) if share is not None]
    rows = [shares[number % len(shares)][number // len(shares)] for number in range(len(loader))]
    if not rows:
        raise ValueError("The evaluation set gave 0 mini-batches: check its split.")
    return metrics.compute(torch.tensor(rows, dtype=torch.float64).sum(0))
