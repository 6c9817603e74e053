"""Where the public names of `gpipe` and `gpipe_torch` are defined.

They are imported on first use: reading a configuration, or finding that a data set is missing, needs no torch.
"""

from importlib import import_module  # noqa: TID251 - of the names below
from typing import Any

_PLACES = {
    "GradientScaler": "pipeline.step_end.gradient_scaler",
    "LayerCost": "planning.profile",
    "NonFiniteError": "pipeline.job.errors",
    "PeerFailure": "pipeline.job.errors",
    "Pipeline": "pipeline.engine",
    "PipelineError": "pipeline.job.errors",
    "StepReport": "pipeline.measurement.step_report",
    "Timeline": "pipeline.timeline",
    "analyze_layers": "planning.profile",
    "as_layers": "tracing.traced_layers",
    "convert_batch_norm": "pipeline.batch_norm",
    "is_recomputing": "pipeline.batch_norm",
    "measure_layers": "planning.timing",
    "partition_layers": "planning.exact_cut",
    "replicated": "pipeline.microbatch",
    "split_along": "pipeline.microbatch",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'gpipe' has no attribute {name!r}")
    return getattr(import_module(f"gpipe.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
