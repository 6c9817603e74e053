"""Image sets: labelled pictures that are looked up by index, in memory or in files."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SPLITS = ("train", "test")
# Photographs only: PIL would start Ghostscript for any file that begins like PostScript.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class BrokenImage(ValueError):
    """Report which image file cannot be decoded, and why."""


class ImageSet(Protocol):
    """Labelled images; anything with these four members works in `ImageLoader`."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Return the class of every image, shape [n], without decoding any."""

    @property
    def class_names(self) -> Sequence[str]:
        """Return the names of the classes; a label is a position in it."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image(self, index: int) -> Image.Image:
        """Decode one image, of mode "L" (grey) or "RGB".

        Raises:
            BrokenImage: the image cannot be decoded.
        """


class ImageArray:
    """Hold images in memory.

    Args:
        images: uint8 [n, h, w] (grey) or [n, h, w, 3].
        labels: integers [n].
        class_names: the name of each class.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.integer], class_names: Sequence[str]) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images have {len(labels)} labels: give each image one label")
        self._images = images
        self.labels = labels.astype(np.int64)
        self.class_names = list(class_names)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return image `index`."""
        return Image.fromarray(self._images[index])


class ImageFiles:
    """Hold images in files below one folder, which are decoded to RGB on request.

    Args:
        root: the folder.
        names: the paths of the images relative to root, [n].
        labels: integers [n].
        class_names: the name of each class.
    """

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int] | NDArray[np.integer], class_names: Sequence[str]
    ) -> None:
        if len(names) != len(labels):
            raise ValueError(f"{len(names)} image files have {len(labels)} labels: give each file one label")
        self.root = root
        # One array of bytes instead of a million strings: every worker process gets a copy.
        self._names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.class_names = list(class_names)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Return the file of image `index`."""
        return self.root / os.fsdecode(self._names[index])

    def image(self, index: int) -> Image.Image:
        """Decode image `index` to RGB.

        Raises:
            BrokenImage: the file, which the message names, is truncated, is no image, has pixels of unknown range, or
                has more than PIL.Image.MAX_IMAGE_PIXELS: a small file can announce more pixels than memory holds.
        """
        path = self.path(index)
        try:
            with _open(path) as image:
                return _to_rgb(image)
        except Exception as error:  # PIL's decoders raise OSError, SyntaxError, struct.error and more
            cause = str(error) or type(error).__name__
            raise BrokenImage(f"cannot decode {path}: {cause}; remove or replace it") from error


def _open(path: Path) -> Image.Image:
    """Read an image's header; PIL's warning about too many pixels is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(path, formats=_FORMATS)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel.

    Of 16 bits the upper 8 are taken, as PIL does with colour. PIL would clip 16-bit grey at 255, which is white.
    """
    is_integer = image.mode == "I"  # PIL's mode for the 16 bits of PGM and, in older versions, of PNG
    if image.mode.startswith("I;16") or (is_integer and image.format in ("PNG", "PPM")):
        image.load()  # numpy would hide the error of a truncated file
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if is_integer or image.mode == "F":
        raise ValueError(f"its pixels are numbers of mode {image.mode}, expected 8 or 16 bits per channel")
    return image.convert("RGB")


def check_name(name: str, folder: Path, entry: str) -> None:
    """Refuse a listed name that would lead out of the images' folder; `entry` names its place in which list."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{entry}: {name!r} is not a path below {folder}; replace the file with the original one")


def are_files(folder: Path, names: Sequence[str]) -> NDArray[np.bool_]:
    """Return for each name whether the file exists, listing each folder once instead of looking for 100,000 files."""
    split_names = [name.rpartition("/") for name in names]
    present = {
        parent: {path.name for path in (folder / parent).iterdir()} if (folder / parent).is_dir() else set()
        for parent in {parent for parent, _, _ in split_names}
    }
    return np.array([last in present[parent] for parent, _, last in split_names], dtype=bool)
