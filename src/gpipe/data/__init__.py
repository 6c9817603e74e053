"""Images: named sets, augmentation, and mini-batches that are a function of the seed."""

import gpipe._torchvision  # noqa: F401  (before anything below imports torchvision)
from gpipe.data.augmentation import Transform, evaluation_transform, training_transform
from gpipe.data.catalogue import IMAGE_SETS, check_image_set, open_image_set
from gpipe.data.image_set import BrokenImage, ImageArray, ImageFiles, ImageSet
from gpipe.data.loader import Batch, ImageLoader
from gpipe.data.source import DataMissing, Source

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
    "Transform",
    "check_image_set",
    "evaluation_transform",
    "open_image_set",
    "training_transform",
]
