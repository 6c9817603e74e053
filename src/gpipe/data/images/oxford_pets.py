"""Oxford-IIIT Pets (Parkhi, Vedaldi, Zisserman, Jawahar 2012): photographs of cats and dogs, 37 breeds."""

from pathlib import Path

from gpipe.data.images.image_list import check_lines
from gpipe.data.images.image_set import ImageFiles
from gpipe.data.images.source import Source, TableCounts
from gpipe.data.images.torchvision_set import open_torchvision_files

_SPLITS = {"train": "trainval", "test": "test"}


def open_oxford_pets(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of its list. Raises ValueError, which names the list that is broken."""
    folder = root / "oxford-iiit-pet"
    listing = folder / "annotations" / f"{_SPLITS[split]}.txt"
    check_lines(listing, r"\S+\s+\d+\s+\d+\s+\d+", "'<image> <class> <species> <breed>'")
    return open_torchvision_files("OxfordIIITPet", root, folder / "images", listing, split=_SPLITS[split])


OXFORD_PETS = Source(
    open=open_oxford_pets,
    required=(
        "oxford-iiit-pet/annotations/trainval.txt",
        "oxford-iiit-pet/annotations/test.txt",
        "oxford-iiit-pet/images/",
    ),
    tree="""\
  <data.root>/oxford-iiit-pet/annotations/trainval.txt    and test.txt
  <data.root>/oxford-iiit-pet/images/Abyssinian_1.jpg    7,349 listed images""",
    how_to_get=(
        "download images.tar.gz and annotations.tar.gz from robots.ox.ac.uk/~vgg/data/pets and unpack both in "
        "<data.root>/oxford-iiit-pet."
    ),
    table=TableCounts(
        num_classes=37,
        num_train_images=3_680,
        num_test_images=3_369,
        notes={"test": "the set's own list has 3,669; the paper's number looks like a misprint"},
    ),
)
