"""FGVC Aircraft and Birdsnap with their true numbers of images, which are all one small photograph."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image


def link_images(folder: Path, names: Iterable[str]) -> None:
    """Put the same photograph under many names."""
    photograph = folder / "photograph.jpg"
    photograph.parent.mkdir(parents=True)
    Image.effect_noise((16, 16), 60).convert("RGB").save(photograph)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        os.link(photograph, folder / name)


def write_fgvc_aircraft(root: Path) -> None:
    """Write 6,667 images for training and validation and 3,333 for testing, of 100 variants."""
    folder = root / "fgvc-aircraft-2013b" / "data"
    numbers = {"trainval": range(6667), "test": range(6667, 10_000)}
    link_images(folder / "images", (f"{number:07}.jpg" for part in numbers.values() for number in part))
    (folder / "variants.txt").write_text("".join(f"variant {variant}\n" for variant in range(100)))
    for listing, part in numbers.items():
        lines = (f"{number:07} variant {number % 100}\n" for number in part)
        (folder / f"images_variant_{listing}.txt").write_text("".join(lines))


def write_birdsnap(root: Path) -> None:
    """Write 47,386 images for training and 2,443 for testing, of 500 species."""
    folder = root / "birdsnap"
    names = [f"Avis_{number % 500}/{number}.jpg" for number in range(47_386 + 2_443)]
    link_images(folder / "download" / "images", names)
    species = "".join(f"{key}\tBird {key}\n" for key in range(500))
    (folder / "species.txt").write_text(f"id\tcommon\n{species}")
    images = "".join(f"{name}\t{number % 500}\n" for number, name in enumerate(names))
    (folder / "images.txt").write_text(f"path\tspecies_id\n{images}")
    tests = "".join(f"{name}\n" for name in names[47_386:])
    (folder / "test_images.txt").write_text(f"path\n{tests}")


WRITERS: dict[str, Callable[[Path], None]] = {"fgvc_aircraft": write_fgvc_aircraft, "birdsnap": write_birdsnap}
