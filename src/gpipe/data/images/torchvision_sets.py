"""Image sets whose files torchvision reads, as image sets of ours."""

from pathlib import Path
from typing import Any

from gpipe.data.images.image_list import open_listed_images
from gpipe.data.images.image_set import ImageFiles


def torchvision_class(name: str) -> Any:
    """Return a class of torchvision.datasets; the import takes seconds, so it waits until a set is opened."""
    import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision import datasets

    return getattr(datasets, name)


def open_torchvision_files(
    class_name: str, root: Path, folder: Path, listing: Path, *, entry: str = "line", **options: str
) -> ImageFiles:
    """Let torchvision read the list of an image set, and open the images it names.

    class_name: which of torchvision.datasets. root: what it takes as root. folder: where the images of this list lie.
    listing, entry: the list that it reads, for messages. options: what else it takes.
    Raises ValueError, which names the list, where it cannot be read or names what cannot be.
    """
    read = torchvision_class(class_name)
    try:
        data_set = read(root, download=False, **options)
    except Exception as error:  # its parsers have no errors of their own: whatever fails first
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot read {listing}: {cause}; replace it with the original file") from error
    paths, labels = _paths_and_labels(data_set)
    names = [path.as_posix().removeprefix(f"{folder.as_posix()}/") for path in paths]
    return open_listed_images(listing, folder, names, labels, data_set.classes, entry=entry)


def _paths_and_labels(data_set: Any) -> tuple[list[Path], list[int]]:
    """Take the paths out of torchvision's private attributes: it has no other way to them without decoding."""
    if hasattr(data_set, "_samples"):
        return [Path(path) for path, _ in data_set._samples], [int(label) for _, label in data_set._samples]
    paths = data_set._images if hasattr(data_set, "_images") else data_set._image_files
    return [Path(path) for path in paths], list(data_set._labels)
