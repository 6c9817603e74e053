"""Evaluate a pipeline on a whole data set."""

from collections.abc import Callable

from torch import nn

from gpipe.pipeline.engine import Pipeline
from gpipe.training.loader import Loader, loaded
from gpipe.training.metrics import EvaluationMetrics, Metrics


def evaluate(
    pipeline: Pipeline,
    loader: Loader,
    layers: nn.ModuleDict | None = None,
    make_metrics: Callable[[], Metrics] = EvaluationMetrics,
) -> dict[str, float]:
    """Return the figures of `make_metrics()` over all of `loader`, the same on every process.

    Every process calls it. `layers` are evaluated in place of the pipeline's own, such as their moving average. The
    last stage counts and tells the others; each replica evaluates the loader that it is given.
    """
    metrics = make_metrics()
    loader.set_epoch(0)
    for inputs, targets in loaded(loader, pipeline):
        outputs = pipeline.evaluate(inputs, layers=layers)
        if pipeline.is_last:
            metrics.update(outputs, targets)
    computed = metrics.compute() if pipeline.is_last else None
    result: dict[str, float] = pipeline.broadcast(computed, from_stage=pipeline.num_stages - 1)
    return result
