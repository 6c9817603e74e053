"""Images, tokens and parallel text: named sets, and mini-batches that are a function of the seed."""

from importlib import import_module  # noqa: TID251 - of the names below
from typing import TYPE_CHECKING, Any

from gpipe.data.images.catalogue import IMAGE_SETS, check_data, check_image_set, count_differences, open_image_set
from gpipe.data.images.image_set import BrokenImage, ImageArray, ImageFiles, ImageSet
from gpipe.data.images.source import DataMissing, Source, TableCounts
from gpipe.data.text.corpora import CORPORA, check_corpus, open_corpus, open_tokenizer
from gpipe.data.text.english_split import SPLITS, split_of
from gpipe.data.text.parallel_corpus import LanguagePairs, ParallelCorpus
from gpipe.data.text.temperature import sampling_probabilities
from gpipe.data.text.tokenizer import Tokenizer
from gpipe.data.text.tokens import RandomTokens, TokenSet

if TYPE_CHECKING:
    from gpipe.data.images.augmentation import Transform, evaluation_transform, training_transform
    from gpipe.data.images.loader import Batch, ImageLoader
    from gpipe.data.text.token_loader import TokenLoader
    from gpipe.data.text.translation_loader import TranslationBatch, TranslationLoader

# Imported when first asked for: they load torch, and finding that a data set is missing must not wait for that.
_PLACES = {
    "Batch": "images.loader",
    "ImageLoader": "images.loader",
    "TokenLoader": "text.token_loader",
    "Transform": "images.augmentation",
    "TranslationBatch": "text.translation_loader",
    "TranslationLoader": "text.translation_loader",
    "evaluation_transform": "images.augmentation",
    "training_transform": "images.augmentation",
}

__all__ = [
    "CORPORA",
    "IMAGE_SETS",
    "SPLITS",
    "Batch",
    "BrokenImage",
    "DataMissing",
    "ImageArray",
    "ImageFiles",
    "ImageLoader",
    "ImageSet",
    "LanguagePairs",
    "ParallelCorpus",
    "RandomTokens",
    "Source",
    "TableCounts",
    "TokenLoader",
    "TokenSet",
    "Tokenizer",
    "Transform",
    "TranslationBatch",
    "TranslationLoader",
    "check_corpus",
    "check_data",
    "check_image_set",
    "count_differences",
    "evaluation_transform",
    "open_corpus",
    "open_image_set",
    "open_tokenizer",
    "sampling_probabilities",
    "split_of",
    "training_transform",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"gpipe.data.{_PLACES[name]}"), name)
