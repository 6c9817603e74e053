"""Every setting of a run, declared and checked; the values are in conf/. Nothing here imports torch.

A field that can change a result has no default in Python (MISSING): every such value stands in conf/. Hydra refuses
unknown keys and wrong types while it composes; `to_run` refuses wrong values when it builds the dataclasses.
"""

from gpipe.config.checks import ConfigError
from gpipe.config.composed import compose_plain, name_sources
from gpipe.config.data import AugmentationPolicy, DataConfig, ImagesConfig, TokensConfig, TranslationDataConfig
from gpipe.config.model import (
    AmoebaNetConfig,
    ModelConfig,
    TiedTables,
    TransformerLMConfig,
    TranslationModelConfig,
    Variant,
)
from gpipe.config.pipeline import (
    Device,
    LaunchConfig,
    Objective,
    PartitionBy,
    PipelineConfig,
    PipelineSchedule,
    Rematerialize,
)
from gpipe.config.run import RunConfig, read_yaml, register_schemas, to_plain, to_run, to_yaml
from gpipe.config.training import (
    AdafactorConfig,
    AdamWConfig,
    Autocast,
    CheckpointsConfig,
    Decay,
    EmaConfig,
    EvaluationConfig,
    NonFiniteAction,
    NonFiniteConfig,
    OptimizerConfig,
    Resume,
    RMSPropConfig,
    ScheduleConfig,
    SGDConfig,
    TrackingConfig,
    TrackingMode,
    TrainerConfig,
)

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "AmoebaNetConfig",
    "AugmentationPolicy",
    "Autocast",
    "CheckpointsConfig",
    "ConfigError",
    "DataConfig",
    "Decay",
    "Device",
    "EmaConfig",
    "EvaluationConfig",
    "ImagesConfig",
    "LaunchConfig",
    "ModelConfig",
    "NonFiniteAction",
    "NonFiniteConfig",
    "Objective",
    "OptimizerConfig",
    "PartitionBy",
    "PipelineConfig",
    "PipelineSchedule",
    "RMSPropConfig",
    "Rematerialize",
    "Resume",
    "RunConfig",
    "SGDConfig",
    "ScheduleConfig",
    "TiedTables",
    "TokensConfig",
    "TrackingConfig",
    "TrackingMode",
    "TrainerConfig",
    "TransformerLMConfig",
    "TranslationDataConfig",
    "TranslationModelConfig",
    "Variant",
    "compose_plain",
    "name_sources",
    "read_yaml",
    "register_schemas",
    "to_plain",
    "to_run",
    "to_yaml",
]
