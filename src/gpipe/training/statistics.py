"""Estimate the statistics of batch norms for the current weights.

Moving averages lag behind the weights, and after a few steps they are still near their initial values. Averaged weights
have never seen a mini-batch: the statistics averaged beside them belong to other weights.
"""

from itertools import islice

from torch import nn

from gpipe.pipeline.engine import Pipeline
from gpipe.training.loader import Loader, iterate


def estimate_statistics(
    pipeline: Pipeline, loader: Loader, num_batches: int, layers: nn.ModuleDict | None = None
) -> None:
    """Replace the moving statistics by their means over the first mini-batches of the epoch of a training loader.

    Each mini-batch is normalised as in training; dropout and drop-path are off. Every process calls it, and the result
    is bitwise the same for every number of stages. `layers` are used in place of the pipeline's own. Source: Izmailov
    et al., 2018, section 3.2, who need it for averaged weights.
    """
    norms = pipeline.batch_norms(layers)
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, counter in before:
        norm.momentum = None  # the plain mean over all mini-batches since the counter was 0
        norm.num_batches_tracked = None if counter is None else counter.new_zeros(())
    try:
        for inputs, _ in islice(iterate(loader, pipeline), num_batches):
            pipeline.evaluate(inputs, layers=layers, move_statistics=True)
    finally:
        for norm, momentum, counter in before:
            norm.momentum, norm.num_batches_tracked = momentum, counter
        loader.close()
