"""Stanford Cars (Krause, Stark, Deng, Fei-Fei 2013): photographs of cars, 196 makes, models and years."""

from pathlib import Path

from gpipe.data.images.image_set import ImageFiles
from gpipe.data.images.matlab_file import check_unpacked_size
from gpipe.data.images.source import Source, TableCounts
from gpipe.data.images.torchvision_set import open_torchvision_files

_CLASSES = "devkit/cars_meta.mat"
_LISTINGS = {"train": "devkit/cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}


def open_stanford_cars(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of its annotations, which are MATLAB files.

    Raises ValueError, which names the file that is broken.
    """
    folder = root / "stanford_cars"
    listing = folder / _LISTINGS[split]
    for path in (listing, folder / _CLASSES):
        check_unpacked_size(path)
    return open_torchvision_files(
        "StanfordCars", root, folder / f"cars_{split}", listing, entry="annotation", split=split
    )


STANFORD_CARS = Source(
    open=open_stanford_cars,
    required=(
        f"stanford_cars/{_CLASSES}",
        *(f"stanford_cars/{listing}" for listing in _LISTINGS.values()),
        "stanford_cars/cars_train/",
        "stanford_cars/cars_test/",
    ),
    tree="""\
  <data.root>/stanford_cars/devkit/cars_meta.mat    and cars_train_annos.mat
  <data.root>/stanford_cars/cars_test_annos_withlabels.mat
  <data.root>/stanford_cars/cars_train/00001.jpg    8,144 images
  <data.root>/stanford_cars/cars_test/00001.jpg    8,041 images""",
    how_to_get=(
        "the authors' page is gone; a copy has cars_train.tgz, cars_test.tgz, car_devkit.tgz and "
        "cars_test_annos_withlabels.mat, to be unpacked in <data.root>/stanford_cars."
    ),
    table=TableCounts(num_classes=196, num_train_images=8_144, num_test_images=8_041),
)
