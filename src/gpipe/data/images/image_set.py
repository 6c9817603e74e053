"""Image sets: labelled pictures that are looked up by index, in memory or in files."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Of photographs only: PIL would let a file that begins like PostScript start Ghostscript, whatever its name ends with.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class BrokenImage(ValueError):
    """Say which image file cannot be decoded, and why."""


class ImageSet(Protocol):
    """Hold labelled images. Anything with these four members works in `ImageLoader`."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Return the class of every image, shape [n], without decoding any."""

    @property
    def class_names(self) -> Sequence[str]:
        """Return the names of the classes; a label is a position in it."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image(self, index: int) -> Image.Image:
        """Decode one image: mode "L" (grey) or "RGB". Raises BrokenImage."""


class ImageArray:
    """Hold images that lie in memory.

    images: uint8 [n, h, w] (grey) or [n, h, w, 3]; labels: integers [n].
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
    """Hold images that lie in files below one folder and are decoded, to RGB, when asked for.

    names: paths relative to root, [n]; labels: integers [n].
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
        """Return where image `index` lies."""
        return self.root / os.fsdecode(self._names[index])

    def image(self, index: int) -> Image.Image:
        """Decode image `index` to RGB.

        Raises BrokenImage, which names the file, for one that is truncated, is no picture, has pixels of unknown range,
        or has more than PIL.Image.MAX_IMAGE_PIXELS of them: the header of a small file can announce more than memory
        holds.
        """
        path = self.path(index)
        try:
            with _open(path) as image:
                return _to_rgb(image)
        except Exception as error:  # PIL's decoders raise OSError, SyntaxError, struct.error and more
            cause = str(error) or type(error).__name__
            raise BrokenImage(f"cannot decode {path}: {cause}; remove or replace it") from error


def _open(path: Path) -> Image.Image:
    """Read an image's header; PIL's warning of too many pixels, an error only at twice as many, is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(path, formats=_FORMATS)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits a channel.

    Of 16 bits the upper 8 are taken, as PIL does with colour; grey it would cut off at 255, and show white.
    """
    is_integer = image.mode == "I"  # PIL has so the 16 bits of PGM and, in older versions, of PNG
    if image.mode.startswith("I;16") or (is_integer and image.format in ("PNG", "PPM")):
        image.load()  # numpy would hide the error of a truncated file
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if is_integer or image.mode == "F":
        raise ValueError(f"its pixels are numbers of mode {image.mode}, expected 8 or 16 bits a channel")
    return image.convert("RGB")
