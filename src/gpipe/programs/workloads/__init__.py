"""A workload is a family of models with its data, its loss and its metrics.

    workload.py              what `gpipe.programs.build` needs from each
    image_classification.py  AmoebaNet; timm_classification.py, any model of timm
    language_modelling.py    Transformer-L, or any language model of transformers
    translation.py           encoder and decoder on pairs of sentences

text_workload.py has what the last two share, traced_model.py what models of other libraries need.
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
