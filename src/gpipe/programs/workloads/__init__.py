"""One file per family of models, with the kind of data that it is trained on.

Like `build`, which uses them, these files know both the settings and the objects built from them.
"""

from gpipe.config import (
    AmoebaNetConfig,
    ConfigError,
    ImagesConfig,
    RunConfig,
    TimmConfig,
    TokensConfig,
    TransformerLMConfig,
    TransformersConfig,
    TranslationDataConfig,
    TranslationModelConfig,
)
from gpipe.programs.complete import complete
from gpipe.programs.workloads.image_classification import AmoebaNetClassification
from gpipe.programs.workloads.language_modelling import TransformerLMModelling, TransformersModelling
from gpipe.programs.workloads.translation import Translation
from gpipe.programs.workloads.workload import Workload

__all__ = ["Workload", "workload_of"]


def workload_of(run: RunConfig) -> Workload:
    """Return the builder of a run's model, loss and data."""
    run = complete(run)
    match run.model, run.data:
        case AmoebaNetConfig() as model, ImagesConfig() as data:
            return AmoebaNetClassification(run, data, model)
        case TimmConfig() as model, ImagesConfig() as data:
            from gpipe.programs.workloads.timm_classification import TimmClassification  # loads timm's models

            return TimmClassification(run, data, model)
        case TransformerLMConfig() as model, TokensConfig() as data:
            return TransformerLMModelling(run, data, model)
        case TransformersConfig() as model, TokensConfig() as data:
            return TransformersModelling(run, data, model)
        case TranslationModelConfig() as model, TranslationDataConfig() as data:
            return Translation(run, model, data)
    raise ConfigError(f"model.family is {run.model.family} with data.name {run.data.name}: add a workload for the two.")
