"""The data's settings: one dataclass per kind of data."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from omegaconf import MISSING

from gpipe.config.checks import (
    MOST_PROCESSES,
    ConfigError,
    Section,
    allowed,
    at_least,
    positive,
    rate,
    require,
    within,
)

_MOST_PIXELS = 16_384  # per side: such an image has 3 GiB


# A published augmentation policy, applied besides crop, flip and colour jitter.
AugmentationPolicy = StrEnum("AugmentationPolicy", ["none", "autoaugment", "randaugment"])
Interpolation = StrEnum("Interpolation", ["bilinear", "bicubic"])


def _is_pair(pair: list[float]) -> bool:
    return len(pair) == 2 and 0 < pair[0] <= pair[1]


@dataclass
class DataConfig(Section):
    """What all data sets share.

    Attributes:
        name: the data set's name, which is that of its file in conf/data.
        root: the folder that holds the data set; null is its usual place.
    """

    place: ClassVar[str] = "data."
    name: str = MISSING
    root: str | None = MISSING


@dataclass
class ImagesConfig(DataConfig):
    """Labelled images, and how they are changed before the model sees them.

    Attributes:
        num_classes: null counts them, where that takes no time.
        image_size: pixels per side; null is the model's own.
        channels: 1 is grey, 3 is colour; a grey image is repeated if 3 are asked for.
        crop_scale: the smallest and the largest share of the area in the training crop; null resizes the whole image.
        crop_aspect: the smallest and the largest ratio of the crop's width to its height.
        cutout: the side of the square that is cut out of a training image, as a share of the image's side; 0 is off.
        mixup, cutmix: training images are mixed in pairs; the larger the value, the more even the weights; 0 or null is
            off. With both, each mini-batch uses one of them.
        random_erasing: the probability that noise replaces a rectangle of a training image; 0 or null is off.
        center_crop: the evaluation crop's share of the side; more than 1 adds a black border; null is the model's own.
        keep_aspect: whether that crop is a square, and not the same share of the height and of the width; null is the
            model's own.
        interpolation: how images are resized; null is the model's own.
        mean, std: the mean and standard deviation of each channel of pixels in [0, 1]; images are normalised by them;
            null is the model's own.
        num_workers: processes that decode images; 0 decodes in the training process.
        prefetch_factor: mini-batches that each worker prepares ahead.
        max_broken_images: the number of broken files allowed per split; another image of the class replaces each.
        max_images: the most images to train on, as many of each class as possible, drawn by the run's seed; null is
            all.
        validation_images: the number of training images held out for choosing settings, drawn in the same way and
            evaluated before the test images; null holds out none.
    """

    num_classes: int | None = at_least(2)
    image_size: int | None = within(3, _MOST_PIXELS)
    channels: int = allowed((1, 3).__contains__, "1 (grey) or 3 (colour)")
    crop_scale: list[float] | None = allowed(
        lambda pair: _is_pair(pair) and pair[1] <= 1, "[smallest, largest] shares of the area, above 0 and at most 1"
    )
    crop_aspect: list[float] = allowed(_is_pair, "[smallest, largest] above 0")
    color_jitter: float = within(0, 1, "a strength")
    flip: bool = MISSING
    policy: AugmentationPolicy = MISSING
    cutout: float = rate()
    mixup: float | None = at_least(0)
    cutmix: float | None = at_least(0)
    random_erasing: float | None = within(0, 1, "a probability")
    center_crop: float | None = allowed(lambda crop: 0 < crop <= 2, "a share of the side in (0, 2]")
    keep_aspect: bool | None = MISSING
    interpolation: Interpolation | None = MISSING
    mean: list[float] | None = MISSING
    std: list[float] | None = MISSING
    num_workers: int = within(0, MOST_PROCESSES)
    prefetch_factor: int = at_least(1)
    max_broken_images: int = at_least(0)
    max_images: int | None = at_least(1)
    validation_images: int | None = at_least(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values, span in (("mean", self.mean, "[0, 1]"), ("std", self.std, "(0, 1]")):
            inside = all(0 <= value <= 1 and (value > 0 or name == "mean") for value in values or ())
            fits = values is None or (inside and len(values) == self.channels)
            require(
                fits, f"data.{name}", values, f"a number in {span} for each of data.channels={self.channels}, or null"
            )

    @property
    def mixes(self) -> bool:
        """Whether training images are mixed in pairs."""
        return bool(self.mixup or self.cutmix)


@dataclass
class OwnImagesConfig(ImagesConfig):
    """The user's own images.

    Attributes:
        validation_share: the share of each class's images that is held out if there is no separate evaluation set; null
            requires such a set.
    """

    validation_share: float | None = allowed(lambda part: 0 < part < 1, "a share between 0 and 1")


@dataclass
class ImageTableConfig(OwnImagesConfig):
    """The user's own images, listed in a table.

    Attributes:
        several_labels: whether an image may have several labels, or none; null takes this from the table.
    """

    several_labels: bool | None = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.several_labels and self.mixes:
            raise ConfigError(
                "data.mixup or data.cutmix is on, but the images have several labels each: set both to null."
            )


@dataclass
class TokensConfig(DataConfig):
    """Sequences of tokens; the model predicts each next token.

    Attributes:
        vocabulary_size: the number of different tokens.
        sequence_length: the number of tokens that the model reads.
    """

    vocabulary_size: int | None = at_least(2)
    sequence_length: int = at_least(1)


@dataclass
class RandomTokensConfig(TokensConfig):
    """Sequences of random tokens.

    Attributes:
        num_train: the number of training sequences.
        num_test: the number of test sequences.
    """

    vocabulary_size: int = at_least(2)
    num_train: int = at_least(1)
    num_test: int = at_least(1)


@dataclass
class TextFolderConfig(TokensConfig):
    """The user's own plain text.

    Attributes:
        vocabulary_size: null is the tokenizer's.
        tokenizer: the path of a SentencePiece model; null is the one that comes with the package.
        validation_share: the share at the end of each file that is held out if there are no separate evaluation texts;
            null requires such texts.
    """

    tokenizer: str | None = MISSING
    validation_share: float | None = allowed(lambda part: 0 < part < 1, "a share between 0 and 1")


@dataclass
class TranslationDataConfig(DataConfig):
    """Pairs of sentences, from several languages to English.

    Attributes:
        languages: codes; null is every language of the corpus.
        tokenizer: the path of a SentencePiece model; null is the one that comes with the data.
        vocabulary_size: the size of that tokenizer, or of the binarised corpus's dictionary.
        temperature: languages are drawn with probability proportional to (share of the pairs)^(1 / temperature).
        max_tokens: the most tokens of a sentence, its end included; longer pairs are left out.
        max_pairs: the most training pairs per language; null is all.
        cache: the folder in which parallel_text and binarized keep token ids and positions of sentences; null is
            token_cache in data.root.
    """

    languages: list[str] | None = allowed(len, "codes of languages")
    tokenizer: str | None = MISSING
    vocabulary_size: int = at_least(5)  # four are special
    temperature: float = positive()
    max_tokens: int = at_least(2)
    max_pairs: int | None = at_least(1)
    cache: str | None = MISSING
