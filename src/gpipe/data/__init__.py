"""Images, tokens and parallel text: sets by name, and mini-batches that are a function of the seed.

images/ and text/ have the sets. All have in common:

    location.py          where a set is, or how to get it
    randomness.py        random numbers as a function of the seed
    epoch_loader.py      the order of an epoch, and the part of each replica
    dataset_loader.py    mini-batches of any torch Dataset
"""

from collections.abc import Sequence
from importlib import import_module  # noqa: TID251 - for the names below
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe.data.images.catalogue import (
    IMAGE_SETS,
    check_image_set,
    count_classes,
    count_differences,
    open_image_set,
    refuse_other_classes,
    tell_several_labels,
)
from gpipe.data.images.image_set import BrokenImage, ImageArray, ImageFiles, ImageSet
from gpipe.data.location import DataMissing, refuse_root
from gpipe.data.text.corpora import CORPORA, check_corpus, open_corpus, open_text_tokenizer, open_tokenizer
from gpipe.data.text.multilingual_text import SPLITS, split_of
from gpipe.data.text.parallel_corpus import LanguagePairs, ParallelCorpus
from gpipe.data.text.text_folder import check_text_folder, open_text_folder
from gpipe.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gpipe.data.dataset_loader import DatasetLoader
    from gpipe.data.images.augmentation import BytesToPixels, Transform, evaluation_transform, training_transform
    from gpipe.data.images.loader import Batch, ImageLoader
    from gpipe.data.images.mixing import Mixing
    from gpipe.data.text.sentence_walk import sampling_probabilities
    from gpipe.data.text.tokens import RandomTokens, TokenLoader, TokenSet
    from gpipe.data.text.translation_loader import TranslationBatch, TranslationLoader

# Imported on first use: they load torch, and a message about missing data must not wait for that.
_MODULES = {
    "dataset_loader": ("DatasetLoader",),
    "images.augmentation": ("BytesToPixels", "Transform", "evaluation_transform", "training_transform"),
    "images.loader": ("Batch", "ImageLoader"),
    "images.mixing": ("Mixing",),
    "text.sentence_walk": ("sampling_probabilities",),
    "text.tokens": ("RandomTokens", "TokenLoader", "TokenSet"),
    "text.translation_loader": ("TranslationBatch", "TranslationLoader"),
}

__all__ = [
    "CORPORA", "IMAGE_SETS", "SPLITS", "Batch", "BrokenImage", "BytesToPixels", "DataMissing", "DatasetLoader",
    "ImageArray", "ImageFiles", "ImageLoader", "ImageSet", "LanguagePairs", "Mixing", "ParallelCorpus", "RandomTokens",
    "TokenLoader", "TokenSet", "Tokenizer", "Transform", "TranslationBatch",
    "TranslationLoader", "check_data", "check_image_set", "count_classes", "count_differences",
    "evaluation_transform", "open_corpus", "open_image_set", "open_text_folder", "open_text_tokenizer",
    "open_tokenizer", "refuse_other_classes", "sampling_probabilities", "split_of", "tell_several_labels",
    "training_transform",
]  # fmt: skip


TOKENS = ("random_tokens", "text_folder")


def check_data(
    name: str,
    root: str | Path | None = None,
    num_classes: int | None = None,
    validation_share: float | None = None,
    languages: Sequence[str] | None = None,
) -> None:
    """Look for a data set of any kind.

    Raises:
        DataMissing: it is missing.
        ValueError: the name is unknown, a folder is given for data that have none, images have another number of
            classes, or a corpus lacks a language.
    """
    if name in CORPORA:
        check_corpus(name, root, languages)
    elif name == "random_tokens":  # a run generates these
        refuse_root(name, root)
    elif name == "text_folder":
        check_text_folder(root, validation_share)
    elif name in IMAGE_SETS:
        check_image_set(name, root, num_classes, validation_share)
    else:
        raise ValueError(
            f"data.name is {name}, expected one of {', '.join((*IMAGE_SETS, *CORPORA, *TOKENS))}: it says how the data "
            "are read; set data.name=image_folder for your own images, text_folder or parallel_text for your own text."
        )


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"gpipe.data.{module}"), name)
