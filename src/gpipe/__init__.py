"""GPipe: pipeline-parallel training by micro-batches and re-materialisation (Huang et al., NeurIPS 2019)."""

from importlib import import_module  # noqa: TID251 - of the names below
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe.pipeline.batch_norm import convert_batch_norm, is_recomputing
    from gpipe.pipeline.engine import Pipeline
    from gpipe.pipeline.gradient_scaler import GradientScaler
    from gpipe.pipeline.job.errors import NonFiniteError, PeerFailure, PipelineError
    from gpipe.pipeline.microbatch import replicated, split_along
    from gpipe.pipeline.step_report import StepReport
    from gpipe.pipeline.timeline import Timeline
    from gpipe.planning.exact_cut import partition_layers
    from gpipe.planning.profile import LayerCost, analyze_layers
    from gpipe.planning.timing import measure_layers

# Imported when first asked for: reading a configuration, or finding that a data set is missing, needs no torch.
_PLACES = {
    "GradientScaler": "pipeline.gradient_scaler",
    "LayerCost": "planning.profile",
    "NonFiniteError": "pipeline.job.errors",
    "PeerFailure": "pipeline.job.errors",
    "Pipeline": "pipeline.engine",
    "PipelineError": "pipeline.job.errors",
    "StepReport": "pipeline.step_report",
    "Timeline": "pipeline.timeline",
    "analyze_layers": "planning.profile",
    "convert_batch_norm": "pipeline.batch_norm",
    "is_recomputing": "pipeline.batch_norm",
    "measure_layers": "planning.timing",
    "partition_layers": "planning.exact_cut",
    "replicated": "pipeline.microbatch",
    "split_along": "pipeline.microbatch",
}

__all__ = [
    "GradientScaler",
    "LayerCost",
    "NonFiniteError",
    "PeerFailure",
    "Pipeline",
    "PipelineError",
    "StepReport",
    "Timeline",
    "analyze_layers",
    "convert_batch_norm",
    "is_recomputing",
    "measure_layers",
    "partition_layers",
    "replicated",
    "split_along",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"gpipe.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
