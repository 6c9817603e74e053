"""GPipe: pipeline-parallel training by micro-batches and re-materialisation (Huang et al., NeurIPS 2019)."""

from gpipe.pipeline.batch_norm import convert_batch_norm
from gpipe.pipeline.cost import LayerCost, analyze_layers, measure_layers
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.failure import NonFiniteError, PeerFailure, PipelineError
from gpipe.pipeline.partition import partition_layers
from gpipe.pipeline.report import StepReport
from gpipe.pipeline.timeline import Timeline

__all__ = [
    "LayerCost",
    "NonFiniteError",
    "PeerFailure",
    "Pipeline",
    "PipelineError",
    "StepReport",
    "Timeline",
    "analyze_layers",
    "convert_batch_norm",
    "measure_layers",
    "partition_layers",
]
