"""The model's settings: one dataclass per family, so that another family's keys are refused."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from gpipe.config.checks import ConfigError, at_least, fixed, positive, rate, require


class Variant(Enum):
    """The AmoebaNets of Real et al."""

    a = "a"
    b = "b"
    c = "c"
    d = "d"


class TiedTables(Enum):
    """Which tables of a translation model share one parameter: source, target and softmax layer."""

    none = "none"
    inputs = "inputs"
    output = "output"
    all = "all"


@dataclass
class ModelConfig:
    """What all families share."""

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

    family: str = "amoebanet"
    variant: Variant = MISSING
    num_layers: int = MISSING
    num_filters: int = MISSING
    auxiliary_head: bool = MISSING
    auxiliary_weight: float = MISSING
    dropout: float = MISSING
    drop_path: float = MISSING
    batch_norm_momentum: float = MISSING
    batch_norm_epsilon: float = MISSING
    min_microbatch_size: int = MISSING

    def __post_init__(self) -> None:
        fixed("model.family", self.family, "amoebanet", "model")
        groups = self.num_layers >= 3 and self.num_layers % 3 == 0
        require(groups, "model.num_layers", self.num_layers, "a multiple of 3, for three equal groups of cells")
        at_least("model.num_filters", self.num_filters, 8)
        at_least("model.auxiliary_weight", self.auxiliary_weight, 0)
        rate("model.dropout", self.dropout)
        rate("model.drop_path", self.drop_path)
        momentum = self.batch_norm_momentum
        require(0 < momentum <= 1, "model.batch_norm_momentum", momentum, "the weight of a new mini-batch in (0, 1]")
        positive("model.batch_norm_epsilon", self.batch_norm_epsilon)
        at_least("model.min_microbatch_size", self.min_microbatch_size, 1)


_TIMM_NAME = re.compile(r"[a-z0-9_]{1,100}(\.[a-z0-9_]{1,100})?")
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

    family: str = "timm"
    name: str = MISSING
    pretrained: bool = MISSING
    arguments: dict[str, Any] = MISSING

    def __post_init__(self) -> None:
        fixed("model.family", self.family, "timm", "model")
        is_name = _TIMM_NAME.fullmatch(self.name) is not None
        require(is_name, "model.name", repr(self.name), "a name that timm.list_models() has, such as resnet50")
        _check_arguments(self.arguments, _NOT_ARGUMENTS, "data, model.pretrained and init_from")


@dataclass
class TransformersConfig(ModelConfig):
    """Any language model of transformers, cut into layers, with random weights; the vocabulary is the data's.

    Attributes:
        name: the type of its configuration, such as gpt2.
        arguments: of that configuration, such as {n_layer: 12}.
    """

    family: str = "transformers"
    name: str = MISSING
    arguments: dict[str, Any] = MISSING

    def __post_init__(self) -> None:
        fixed("model.family", self.family, "transformers", "model")
        is_name = re.fullmatch(r"[a-z0-9_-]{1,100}", self.name) is not None
        require(is_name, "model.name", repr(self.name), "the type of a language model of transformers, such as gpt2")
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

    family: str = "transformer_lm"
    num_layers: int = MISSING
    model_size: int = MISSING
    feedforward_size: int = MISSING
    num_heads: int = MISSING
    dropout: float = MISSING

    def __post_init__(self) -> None:
        fixed("model.family", self.family, "transformer_lm", "model")
        at_least("model.num_layers", self.num_layers, 1)
        at_least("model.feedforward_size", self.feedforward_size, 1)
        at_least("model.num_heads", self.num_heads, 1)
        fits = self.model_size >= 2 and self.model_size % 2 == 0 and self.model_size % self.num_heads == 0
        require(fits, "model.model_size", self.model_size, f"an even multiple of model.num_heads={self.num_heads}")
        rate("model.dropout", self.dropout)


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

    family: str = "translation_transformer"
    num_layers: int = MISSING
    feedforward_size: int = MISSING
    num_heads: int = MISSING
    model_size: int = MISSING
    head_size: int = MISSING
    dropout: float = MISSING
    tied: TiedTables = MISSING
    scale_feedforward: bool = MISSING
    logit_limit: float | None = MISSING
    soft_limit: bool = MISSING

    def __post_init__(self) -> None:
        fixed("model.family", self.family, "translation_transformer", "model")
        at_least("model.num_layers", self.num_layers, 1)
        at_least("model.feedforward_size", self.feedforward_size, 1)
        at_least("model.num_heads", self.num_heads, 1)
        fits = self.model_size >= 2 and self.model_size % 2 == 0
        require(fits, "model.model_size", self.model_size, "an even number, so that every sine has a cosine")
        at_least("model.head_size", self.head_size, 1)
        rate("model.dropout", self.dropout)
        limit = self.logit_limit
        require(limit is None or limit > 0, "model.logit_limit", limit, "a number above 0, or null")
        has_limit = limit is not None or not self.soft_limit
        require(has_limit, "model.soft_limit", self.soft_limit, "false where model.logit_limit is null")
