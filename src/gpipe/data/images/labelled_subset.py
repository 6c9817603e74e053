"""Choose a subset, and a validation split, of a set's training images."""

import random

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gpipe.data.images.image_set import ImageSet


class ImageSubset:
    """The images of a set at these positions, integers [n], in this order."""

    def __init__(self, image_set: ImageSet, positions: NDArray[np.int64]) -> None:
        self._image_set, self._positions = image_set, positions
        self.labels, self.class_names = image_set.labels[positions], image_set.class_names

    def __len__(self) -> int:
        return len(self._positions)

    def image(self, index: int) -> Image.Image:
        """Decode image `index`; errors are those of the whole set."""
        return self._image_set.image(int(self._positions[index]))


def order_by_class(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the positions of all images, whose classes are `labels` [n], in the order of a stratified choice.

    The images of each class are shuffled. Then each class gives one image in turn, while it has any. So the first n
    images are as balanced over the classes as possible, for every n.
    """
    draw = random.Random(f"labelled images {seed}")  # noqa: S311 - no secret
    ranks = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = list(range(len(members)))
        draw.shuffle(order)
        ranks[members] = order
    return np.lexsort((labels, ranks)).astype(np.int64)


def split_training_images(
    name: str, image_set: ImageSet, max_images: int | None, validation_images: int | None, seed: int
) -> tuple[ImageSet, ImageSet | None]:
    """Return the training images and the validation images; no image is in both.

    The validation images are the first of `order_by_class`, so they do not depend on `max_images`; the training images
    come next, so a smaller set is a subset of a larger one. The last image of each class stays for training, which
    would otherwise never see a small class.

    Args:
        name: the set's name, for messages.
        image_set: its training images.
        max_images: the most images to train on; None takes all that are left.
        validation_images: the number of images for choosing settings; None holds out none.
        seed: the seed of the choice.

    Raises:
        ValueError: the set has too few images, or they have several labels each.
    """
    if max_images is None and validation_images is None:
        return image_set, None
    counts = {"data.max_images": max_images, "data.validation_images": validation_images}
    given = " and ".join(f"{key} is {count}" for key, count in counts.items() if count is not None)
    if image_set.labels.ndim != 1:
        raise ValueError(f"{given}, but an image of {name} may have several labels: set both to null.")
    order = order_by_class(image_set.labels.astype(np.int64), seed)
    _, ends = np.unique(image_set.labels[order[::-1]], return_index=True)  # of each class, counted from the end
    num_kept = validation_images or 0
    if num_kept + max(max_images or 1, len(ends)) > len(order):
        most = len(order) if max_images else len(order) - len(ends)  # each class keeps an image
        remedy = f"lower them to at most {most} together" if max_images and num_kept else f"lower it to at most {most}"
        raise ValueError(f"{given}, but {name} has {len(image_set):,} training images: {remedy}.")
    kept = np.delete(order, len(order) - 1 - ends)[:num_kept]
    train = order[~np.isin(order, kept)][:max_images]
    return ImageSubset(image_set, np.sort(train)), ImageSubset(image_set, np.sort(kept)) if validation_images else None
