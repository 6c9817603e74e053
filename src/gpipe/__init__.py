"""GPipe: pipeline-parallel training by micro-batches and re-materialisation (Huang et al., NeurIPS 2019)."""

from typing import TYPE_CHECKING

from gpipe.public_names import __all__ as __all__
from gpipe.public_names import __dir__ as __dir__
from gpipe.public_names import __getattr__ as __getattr__

if TYPE_CHECKING:  # what `public_names` imports on first use
    from gpipe.pipeline.batch_norm import convert_batch_norm as convert_batch_norm
    from gpipe.pipeline.batch_norm import is_recomputing as is_recomputing
    from gpipe.pipeline.engine import Pipeline as Pipeline
    from gpipe.pipeline.job.errors import NonFiniteError as NonFiniteError
    from gpipe.pipeline.job.errors import PeerFailure as PeerFailure
    from gpipe.pipeline.job.errors import PipelineError as PipelineError
    from gpipe.pipeline.measurement.step_report import StepReport as StepReport
    from gpipe.pipeline.microbatch import replicated as replicated
    from gpipe.pipeline.microbatch import split_along as split_along
    from gpipe.pipeline.step_end.gradient_scaler import GradientScaler as GradientScaler
    from gpipe.pipeline.timeline import Timeline as Timeline
    from gpipe.planning.exact_cut import partition_layers as partition_layers
    from gpipe.planning.profile import LayerCost as LayerCost
    from gpipe.planning.profile import analyze_layers as analyze_layers
    from gpipe.planning.timing import measure_layers as measure_layers
    from gpipe.tracing.traced_layers import as_layers as as_layers
