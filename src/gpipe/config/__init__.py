"""Every setting of a run, declared and checked; the values are in conf/. Nothing here imports torch.

A field that can change a result has no default in Python (MISSING): every such value stands in conf/. Hydra refuses
unknown keys and wrong types while it composes; `to_run` refuses wrong values when it builds the dataclasses.
"""

from gpipe.config.checks import ConfigError
from gpipe.config.composed import compose_plain, name_sources
from gpipe.config.data import (
    ImagesConfig,
    ImageTableConfig,
    Interpolation,
    OwnImagesConfig,
    RandomTokensConfig,
    TextFolderConfig,
    TokensConfig,
    TranslationDataConfig,
)
from gpipe.config.model import (
    AmoebaNetConfig,
    ModelConfig,
    TiedTables,
    TimmConfig,
    TransformerLMConfig,
    TransformersConfig,
    TranslationModelConfig,
)
from gpipe.config.pipeline import Device, PartitionBy, RematerializeChoice
from gpipe.config.run import RunConfig, read_yaml, register_schemas, to_plain, to_run, to_yaml
from gpipe.config.training import Autocast, Decay, OptimizerConfig, Resume, TrainerConfig

__all__ = [
    "AmoebaNetConfig",
    "Autocast",
    "ConfigError",
    "Decay",
    "Device",
    "ImageTableConfig",
    "ImagesConfig",
    "Interpolation",
    "ModelConfig",
    "OptimizerConfig",
    "OwnImagesConfig",
    "PartitionBy",
    "RandomTokensConfig",
    "RematerializeChoice",
    "Resume",
    "RunConfig",
    "TextFolderConfig",
    "TiedTables",
    "TimmConfig",
    "TokensConfig",
    "TrainerConfig",
    "TransformerLMConfig",
    "TransformersConfig",
    "TranslationDataConfig",
    "TranslationModelConfig",
    "compose_plain",
    "name_sources",
    "read_yaml",
    "register_schemas",
    "to_plain",
    "to_run",
    "to_yaml",
]
