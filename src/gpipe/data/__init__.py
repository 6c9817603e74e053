"""Images and tokens: named sets, augmentation, and mini-batches that are a function of the seed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpipe.data.catalogue import IMAGE_SETS, check_data, check_image_set, count_differences, open_image_set
from gpipe.data.image_set import BrokenImage, ImageArray, ImageFiles, ImageSet
from gpipe.data.source import DataMissing, Source, TableCounts
from gpipe.data.tokens import RandomTokens, TokenSet

if TYPE_CHECKING:
    from gpipe.data.augmentation import Transform, evaluation_transform, training_transform
    from gpipe.data.loader import Batch, ImageLoader
    from gpipe.data.token_loader import TokenLoader

# Imported when first asked for: they load torch, and finding that a data set is missing must not wait for that.
_PLACES = {
    "Batch": "loader",
    "ImageLoader": "loader",
    "TokenLoader": "token_loader",
    "Transform": "augmentation",
    "evaluation_transform": "augmentation",
    "training_transform": "augmentation",
}

__all__ = [
    "IMAGE_SETS",
    "Batch",
    "BrokenImage",
    "DataMissing",
    "ImageArray",
    "ImageFiles",
    "ImageLoader",
    "ImageSet",
    "RandomTokens",
    "Source",
    "TableCounts",
    "TokenLoader",
    "TokenSet",
    "Transform",
    "check_data",
    "check_image_set",
    "count_differences",
    "evaluation_transform",
    "open_image_set",
    "training_transform",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"gpipe.data.{_PLACES[name]}"), name)
