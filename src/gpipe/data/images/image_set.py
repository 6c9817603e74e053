"""Image sets: labelled images by index, in memory or in files."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol
from unicodedata import category

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

SPLITS = ("train", "test")
# Photographs only: PIL starts Ghostscript for any file that begins like PostScript.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Files with these suffixes count as images; browsers save JPEG as .jfif too.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".gif", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class BrokenImage(ValueError):
    """An image file cannot be decoded; the message names it and the cause."""


class ImageSet(Protocol):
    """Labelled images. `ImageLoader` accepts anything with these four members."""

    @property
    def labels(self) -> NDArray[np.int64] | NDArray[np.bool_]:
        """Return the class of every image, [n], without decoding any; for several labels each, [n, classes]."""

    @property
    def class_names(self) -> Sequence[str]:
        """Return the names of the classes, by label."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image(self, index: int) -> Image.Image:
        """Decode one image, of mode "L" (grey) or "RGB".

        Raises:
            BrokenImage: the image cannot be decoded.
        """


class ImageArray:
    """Images in memory.

    Args:
        images: uint8 [n, h, w] (grey) or [n, h, w, 3].
        labels: integers [n].
        class_names: the name of each class.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.integer], class_names: Sequence[str]) -> None:
        self._images = images
        self.labels = labels.astype(np.int64)
        self.class_names = list(class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return image `index`."""
        return Image.fromarray(self._images[index])


class ImageFiles:
    """Images in files below one folder, decoded to RGB on request.

    Args:
        root: the folder.
        names: the paths of the images relative to root, [n].
        labels: integers [n]; or, for several labels each, bool [n, classes]: whether an image has each label.
        class_names: the name of each class.
        left_out: paths relative to root of files that are not images, by their names.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_],
        class_names: Sequence[str],
        left_out: Sequence[str] = (),
    ) -> None:
        self.root = root
        # An array of bytes, not a million strings: every worker process gets a copy.
        self._names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        has_several = isinstance(labels, np.ndarray) and labels.dtype == np.bool_
        self.labels: NDArray[np.int64] | NDArray[np.bool_] = np.asarray(labels, dtype=None if has_several else np.int64)
        self.class_names = list(class_names)
        self._left_out = list(left_out)

    def warnings(self) -> list[str]:
        """Say how many files are left out, and name the first."""
        if not self._left_out:
            return []
        count, first = len(self._left_out), self._left_out[0]
        files = "1 file" if count == 1 else f"{count:,} files"
        return [f"{files} below {self.root} left out, such as {first}: convert those that are images to JPEG or PNG"]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Return the file of image `index`."""
        return self.root / os.fsdecode(self._names[index])

    def image(self, index: int) -> Image.Image:
        """Decode image `index` to RGB.

        Raises:
            BrokenImage: the file is truncated, is not an image, has pixels of unknown range, or has more than
                PIL.Image.MAX_IMAGE_PIXELS: a small file can announce more pixels than memory holds.
        """
        path = self.path(index)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as advice on palettes with transparency, once per image
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(path, formats=_FORMATS) as image:
                    return _to_rgb(image)
        except Exception as error:  # PIL's decoders raise OSError, SyntaxError, struct.error and more
            cause = str(error) or type(error).__name__
            raise BrokenImage(f"cannot decode {path}: {cause}; remove or replace it") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel.

    Grey with 12 or 16 bits keeps its upper 8 bits, like PIL's 16-bit colours. PIL would clip it at 255, which is white.
    """
    is_integer = image.mode == "I"  # PIL's mode for the 16 bits of PGM and, in older versions, of PNG
    if image.mode.startswith("I;16") or (is_integer and image.format in ("PNG", "PPM")):
        tags = getattr(image, "tag_v2", {})  # a TIFF's: only a TIFF may have 12 bits, or 0 for white
        bits, is_inverted = tags.get(BITSPERSAMPLE, (16,))[0], tags.get(PHOTOMETRIC_INTERPRETATION) == 0
        image.load()  # numpy would hide the error of a truncated file
        grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
        return Image.fromarray(255 - grey if is_inverted else grey).convert("RGB")
    if is_integer or image.mode == "F":
        raise ValueError(f"its pixels are numbers of mode {image.mode}, expected 8 or 16 bits per channel")
    return image.convert("RGB")


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, such as those that macOS and NAS leave beside images."""
    return name.startswith(".") or name == "@eaDir"  # where a Synology NAS keeps thumbnails


def is_class_name(name: str) -> bool:
    """Return whether a name fits on one line of a file or terminal: UTF-8 without control characters."""
    return name.isprintable() or not any(category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name)


def is_image(name: str) -> bool:
    """Return whether a file of this name counts as an image."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name)


def check_name(name: str, folder: Path, entry: str) -> None:
    """Refuse a listed name that leads out of the images' folder; `entry` says where it is listed."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{entry}: {name!r} is not a path below {folder}; replace the file with the original one")


def are_files(folder: Path, names: Sequence[str]) -> NDArray[np.bool_]:
    """Return whether each file exists. Listing each folder once is faster than looking for 100,000 files."""
    split_names = [name.rpartition("/") for name in names]
    present = {
        parent: {path.name for path in (folder / parent).iterdir()} if (folder / parent).is_dir() else set()
        for parent in {parent for parent, _, _ in split_names}
    }
    return np.array([last in present[parent] for parent, _, last in split_names], dtype=bool)
