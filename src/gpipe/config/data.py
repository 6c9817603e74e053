"""The data's settings: one dataclass a kind of data."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from gpipe.config.checks import above, at_least, optional_at_least, rate, require


class AugmentationPolicy(Enum):
    """A published set of random changes to a training image, beside crop, flip and colour jitter."""

    none = "none"
    autoaugment = "autoaugment"
    randaugment = "randaugment"


@dataclass
class DataConfig:
    """What all data sets share.

    root: the folder that holds the set; null is its usual place.
    """

    name: str = MISSING
    root: str | None = MISSING


@dataclass
class ImagesConfig(DataConfig):
    """Labelled images, and what happens to them before the model sees them.

    image_size: pixels a side. channels: 1 is grey, 3 is colour; a grey image is repeated where 3 are asked for.
    crop_scale: the training crop's share of the area; null resizes the whole image instead.
    crop_aspect: the crop's width over height.
    cutout: side of the square that is cut out of a training image, as a share of the image's side; 0 is off.
    center_crop: the evaluation crop's share of the side. num_workers: processes that decode, 0 is none.
    max_broken_images: so many files of a split may be broken; another image of the class stands in for each.
    """

    num_classes: int = MISSING
    image_size: int = MISSING
    channels: int = MISSING
    crop_scale: list[float] | None = MISSING
    crop_aspect: list[float] = MISSING
    color_jitter: float = MISSING
    flip: bool = MISSING
    policy: AugmentationPolicy = MISSING
    cutout: float = MISSING
    center_crop: float = MISSING
    num_workers: int = MISSING
    prefetch_factor: int = MISSING
    max_broken_images: int = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        at_least("data.num_classes", self.num_classes, 2)
        at_least("data.image_size", self.image_size, 3)
        require(self.channels in (1, 3), "data.channels", self.channels, "1 (grey) or 3 (colour)")
        _pair("data.crop_aspect", self.crop_aspect)
        if self.crop_scale is not None:
            _pair("data.crop_scale", self.crop_scale)
            require(self.crop_scale[1] <= 1, "data.crop_scale", self.crop_scale, "shares of the area, at most 1")
        require(0 <= self.color_jitter <= 1, "data.color_jitter", self.color_jitter, "a strength from 0 to 1")
        rate("data.cutout", self.cutout)
        require(0 < self.center_crop <= 1, "data.center_crop", self.center_crop, "a share of the side in (0, 1]")
        at_least("data.num_workers", self.num_workers, 0)
        at_least("data.prefetch_factor", self.prefetch_factor, 1)
        at_least("data.max_broken_images", self.max_broken_images, 0)


@dataclass
class TokensConfig(DataConfig):
    """Sequences of tokens, in which a model tells each next one.

    sequence_length: tokens that are read. num_train, num_test: sequences.
    """

    vocabulary_size: int = MISSING
    sequence_length: int = MISSING
    num_train: int = MISSING
    num_test: int = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        at_least("data.vocabulary_size", self.vocabulary_size, 2)
        for name in ("sequence_length", "num_train", "num_test"):
            at_least(f"data.{name}", getattr(self, name), 1)


@dataclass
class TranslationDataConfig(DataConfig):
    """Pairs of sentences of several languages with one target language, English.

    languages: codes; null is all that the corpus has. tokenizer: path of a SentencePiece model; null is the one that
    comes with the data. vocabulary_size: of that tokenizer, or of the binarised corpus's dictionary.
    temperature: languages are drawn with (share of the pairs)^(1 / temperature). max_tokens: of the longest sentence,
    its end included; longer ones are left out. max_pairs: the most training pairs of a language; null is all.
    cache: the folder in which parallel_text and binarized keep what is read once, the ids of a text and where sentences
    lie; null is token_cache in data.root.
    """

    languages: list[str] | None = MISSING
    tokenizer: str | None = MISSING
    vocabulary_size: int = MISSING
    temperature: float = MISSING
    max_tokens: int = MISSING
    max_pairs: int | None = MISSING
    cache: str | None = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        require(self.languages != [], "data.languages", self.languages, "codes of languages, or null for all")
        at_least("data.vocabulary_size", self.vocabulary_size, 5)  # four are special
        above("data.temperature", self.temperature, 0)
        at_least("data.max_tokens", self.max_tokens, 2)
        optional_at_least("data.max_pairs", self.max_pairs, 1)


def _pair(name: str, pair: list[float]) -> None:
    require(len(pair) == 2 and 0 < pair[0] <= pair[-1], name, pair, "[smallest, largest] above 0")
