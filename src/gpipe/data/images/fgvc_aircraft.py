"""FGVC Aircraft (Maji, Kannala, Rahtu, Blaschko, Vedaldi 2013): photographs of aircraft, 100 variants."""

import re
from pathlib import Path

from gpipe.data.images.image_list import check_lines
from gpipe.data.images.image_set import ImageFiles
from gpipe.data.images.source import Source, TableCounts
from gpipe.data.images.torchvision_set import open_torchvision_files

_SPLITS = {"train": "trainval", "test": "test"}


def open_fgvc_aircraft(root: Path, split: str) -> ImageFiles:
    """List the images of a split, labelled with the finest level of the annotation, the variant.

    Raises ValueError, which names the list that is broken.
    """
    folder = root / "fgvc-aircraft-2013b" / "data"
    listing = folder / f"images_variant_{_SPLITS[split]}.txt"
    variants = (folder / "variants.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    any_variant = "|".join(re.escape(variant.strip()) for variant in variants if variant.strip())
    check_lines(listing, rf"\S+ (?:{any_variant})", "'<image> <variant>' with a variant that variants.txt lists")
    options = {"split": _SPLITS[split], "annotation_level": "variant"}
    return open_torchvision_files("FGVCAircraft", root, folder / "images", listing, **options)


FGVC_AIRCRAFT = Source(
    open=open_fgvc_aircraft,
    required=tuple(
        f"fgvc-aircraft-2013b/data/{name}"
        for name in ("variants.txt", "images_variant_trainval.txt", "images_variant_test.txt", "images/")
    ),
    tree="""\
  <data.root>/fgvc-aircraft-2013b/data/variants.txt
  <data.root>/fgvc-aircraft-2013b/data/images_variant_trainval.txt    and images_variant_test.txt
  <data.root>/fgvc-aircraft-2013b/data/images/0034309.jpg    10,000 images""",
    how_to_get=(
        "download fgvc-aircraft-2013b.tar.gz from robots.ox.ac.uk/~vgg/data/fgvc-aircraft and unpack it in <data.root>."
    ),
    table=TableCounts(num_classes=100, num_train_images=6_667, num_test_images=3_333),
)
