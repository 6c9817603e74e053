"""Food-101 (Bossard, Guillaumin, Van Gool 2014): photographs of dishes, 101 classes."""

from pathlib import Path

from gpipe.data.images.image_set import ImageFiles
from gpipe.data.images.source import Source, TableCounts
from gpipe.data.images.torchvision_set import open_torchvision_files


def open_food101(root: Path, split: str) -> ImageFiles:
    """List the images of a split in the order of its list, class by class.

    Raises ValueError, which names the list that is broken, or has other classes than classes.txt.
    """
    folder = root / "food-101"
    listing = folder / "meta" / f"{split}.json"
    image_set = open_torchvision_files("Food101", root, folder / "images", listing, entry="image", split=split)
    # torchvision numbers the classes of each list by themselves: one class less in a list, and all others would shift.
    names_file = folder / "meta" / "classes.txt"
    class_names = names_file.read_text(encoding="utf-8", errors="replace").split()
    if different := sorted(set(class_names).symmetric_difference(image_set.class_names)):
        raise ValueError(
            f"{listing} has {len(image_set.class_names)} classes and {names_file} has {len(class_names)}, different in "
            f"{different[0]!r}; replace both with the original files"
        )
    return image_set


FOOD101 = Source(
    open=open_food101,
    required=("food-101/meta/classes.txt", "food-101/meta/train.json", "food-101/meta/test.json", "food-101/images/*/"),
    tree="""\
  <data.root>/food-101/meta/classes.txt    train.json and test.json
  <data.root>/food-101/images/apple_pie/1005649.jpg    101 class folders, 101,000 images""",
    how_to_get=(
        "download food-101.tar.gz from data.vision.ee.ethz.ch/cvl/datasets_extra/food-101 and unpack it in <data.root>."
    ),
    table=TableCounts(num_classes=101, num_train_images=75_750, num_test_images=25_250),
)
