"""ImageNet-2012 as class folders of JPEG files, the layout that most tools share."""

from pathlib import Path

from gpipe.data.images.class_folders import list_class_folders
from gpipe.data.images.image_set import ImageFiles
from gpipe.data.images.source import Source, TableCounts

_FOLDERS = {"train": "train", "test": "val"}


def open_image_folder(root: Path, split: str) -> ImageFiles:
    """List the images of a split, in the order of their paths; the "test" split is root/val.

    The classes are the folders of root/train, sorted. Raises ValueError where root/val has other ones, a folder cannot
    be listed, or a link leads back to one; FileNotFoundError where a class has no image.
    """
    import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

    class_names, _ = find_classes(root / "train")
    val_classes = set(find_classes(root / "val")[0])
    if different := sorted(val_classes.symmetric_difference(class_names)):
        raise ValueError(
            f"{root / 'train'} has {len(class_names)} class folders and {root / 'val'} has {len(val_classes)}, "
            f"different in {different[0]!r}; sort the val images into folders with the names of the training classes"
        )
    folder = root / _FOLDERS[split]
    names, labels = list_class_folders(folder, class_names, IMG_EXTENSIONS)
    return ImageFiles(folder, names, labels, class_names)


IMAGENET = Source(
    open=open_image_folder,
    required=("train/*/", "val/*/"),
    tree="""\
  <data.root>/train/n01440764/n01440764_10026.JPEG    1,000 class folders, 1,281,167 images
  <data.root>/val/n01440764/ILSVRC2012_val_00000293.JPEG    the same 1,000 class folders, 50,000 images""",
    how_to_get=(
        "register at image-net.org, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, unpack the training "
        "tar's inner tars each into a folder of its name, sort the val images into folders of the same names, and set "
        "data.root."
    ),
    table=TableCounts(num_classes=1_000, num_train_images=1_281_167, num_test_images=50_000),
)
