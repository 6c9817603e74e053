"""The model's settings: one dataclass per family, so that another family's keys are refused."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from omegaconf import MISSING

from gpipe.config.checks import ConfigError, Section, allowed, at_least, kind, positive, rate, require, share

Variant = StrEnum("Variant", ["a", "b", "c", "d"])  # of the AmoebaNets of Real et al.
# Which tables of a translation model share one parameter: source, target and softmax layer.
TiedTables = StrEnum("TiedTables", ["none", "inputs", "output", "all"])


@dataclass
class ModelConfig(Section):
    """What all families share."""

    place: ClassVar[str] = "model."
    family: str = MISSING


@dataclass
class AmoebaNetConfig(ModelConfig):
    """AmoebaNet (L, D); the image size, the channels and the classes are the data's.

    Attributes:
        auxiliary_head: whether training has an auxiliary head, whose loss counts auxiliary_weight times.
        drop_path: the rate at the end of training, to which it rises linearly from 0.
        batch_norm_momentum: the weight of a new mini-batch in the running statistics, 1 minus TensorFlow's decay.
        min_microbatch_size: refuse a run in which batch norm sees fewer images at once.
    """

    family: str = kind("amoebanet")
    variant: Variant = MISSING
    num_layers: int = allowed(lambda n: n >= 3 and n % 3 == 0, "a multiple of 3, for three equal groups of cells")
    num_filters: int = at_least(8)
    auxiliary_head: bool = MISSING
    auxiliary_weight: float = at_least(0)
    dropout: float = rate()
    drop_path: float = rate()
    batch_norm_momentum: float = share("the weight of a new mini-batch")
    batch_norm_epsilon: float = positive()
    min_microbatch_size: int = at_least(1)


_TIMM_NAME = re.compile(r"[a-z0-9_]{1,100}(\.[a-z0-9_]{1,100})?")
_TRANSFORMERS_NAME = re.compile(r"[a-z0-9_-]{1,100}")
# Other settings determine these, or they name files to read or code to run.
_NOT_ARGUMENTS = (
    "cache_dir", "checkpoint_path", "exportable", "img_size", "in_chans", "model_name", "no_jit", "num_classes",
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "scriptable",
)  # fmt: skip

_NOT_OF_TRANSFORMERS = (
    "_name_or_path", "auto_map", "bos_token_id", "eos_token_id", "name_or_path", "pad_token_id", "quantization_config",
    "trust_remote_code", "use_cache", "vocab_size",
)  # fmt: skip


@dataclass
class TimmConfig(ModelConfig):
    """Any classification model of timm, cut into layers; the image size, the channels and the classes are the data's.

    Attributes:
        name: timm's, with or without the tag of pre-trained weights.
        pretrained: whether timm downloads weights; nothing else here does.
        arguments: further arguments of timm's for this model, such as {drop_path_rate: 0.1}.
    """

    family: str = kind("timm")
    name: str = allowed(_TIMM_NAME.fullmatch, "a name that timm.list_models() has, such as resnet50")
    pretrained: bool = MISSING
    arguments: dict[str, Any] = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_arguments(self.arguments, _NOT_ARGUMENTS, "data, model.pretrained and init_from")


@dataclass
class TransformersConfig(ModelConfig):
    """Any language model of transformers, cut into layers, with random weights; the vocabulary is the data's.

    Attributes:
        name: the type of its configuration, such as gpt2.
        arguments: of that configuration, such as {n_layer: 12}.
    """

    family: str = kind("transformers")
    name: str = allowed(_TRANSFORMERS_NAME.fullmatch, "the type of a language model of transformers, such as gpt2")
    arguments: dict[str, Any] = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_arguments(self.arguments, _NOT_OF_TRANSFORMERS, "data and init_from")


def _check_arguments(arguments: dict[str, Any], refused: tuple[str, ...], others: str) -> None:
    for name, value in arguments.items():
        place = f"model.arguments.{name}"
        if name in refused:
            raise ConfigError(f"{place} is {value}, but {others} determine it: leave it out.")
        require(_is_plain(value), place, value, "a number, a word, yes or no, null, or a list of those")


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and abs(value) < 1e9)


@dataclass
class TransformerLMConfig(ModelConfig):
    """Transformer-L, a language model; the vocabulary is the data's.

    Attributes:
        model_size: the width of the states, an even multiple of num_heads.
        dropout: of embeddings and of the output of each half of a layer.
    """

    family: str = kind("transformer_lm")
    num_layers: int = at_least(1)
    model_size: int = MISSING
    feedforward_size: int = at_least(1)
    num_heads: int = at_least(1)
    dropout: float = rate()

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.model_size >= 2 and self.model_size % 2 == 0 and self.model_size % self.num_heads == 0
        require(fits, "model.model_size", self.model_size, f"an even multiple of model.num_heads={self.num_heads}")


@dataclass
class TranslationModelConfig(ModelConfig):
    """T(L, H, A), an encoder and a decoder of num_layers each; the vocabulary is the data's.

    Attributes:
        model_size: the width of the states, even.
        head_size: channels per head, independent of the width.
        dropout: of embeddings and of the output of each part of a layer.
        tied: which tables are one parameter.
        scale_feedforward: initialise feed-forward weights at 1 / num_layers times their usual size.
        logit_limit: the largest magnitude of a logit in training; null is no limit.
        soft_limit: approach the limit by tanh instead of cutting off there.
    """

    family: str = kind("translation_transformer")
    num_layers: int = at_least(1)
    feedforward_size: int = at_least(1)
    num_heads: int = at_least(1)
    model_size: int = allowed(lambda n: n >= 2 and n % 2 == 0, "an even number, so that every sine has a cosine")
    head_size: int = at_least(1)
    dropout: float = rate()
    tied: TiedTables = MISSING
    scale_feedforward: bool = MISSING
    logit_limit: float | None = positive()
    soft_limit: bool = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        has_limit = self.logit_limit is not None or not self.soft_limit
        require(has_limit, "model.soft_limit", self.soft_limit, "false where model.logit_limit is null")
