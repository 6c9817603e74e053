"""Images: named sets, augmentation, and mini-batches that are a function of the seed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpipe.data.catalogue import IMAGE_SETS, check_image_set, count_differences, open_image_set
from gpipe.data.image_set import BrokenImage, ImageArray, ImageFiles, ImageSet
from gpipe.data.source import DataMissing, Source, TableCounts

if TYPE_CHECKING:
    from gpipe.data.augmentation import Transform, evaluation_transform, training_transform
    from gpipe.data.loader import Batch, ImageLoader

# Imported when first asked for: they load torch, and finding that a data set is missing must not wait for that.
_PLACES = {
    "Batch": "loader",
    "ImageLoader": "loader",
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
    "Source",
    "TableCounts",
    "Transform",
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
