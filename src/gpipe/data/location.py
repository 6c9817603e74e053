"""Where an image set comes from, and what to say when it is not there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from gpipe.data.images.image_set import ImageSet

EMBEDDED_ALTERNATIVE = (
    "data=fashion_mnist_embedded, or an experiment named ..._laptop, uses photographs that come with this package."
)
SPLITS = ("train", "test")


class DataMissing(FileNotFoundError):
    """Say what was looked for, the tree that is expected, how to get it, and what works without it."""


@dataclass(frozen=True)
class TableCounts:
    """Hold what Table 4 of the paper says of an image set.

    notes: split -> why a true copy of the set has another number of images.
    """

    num_classes: int
    num_train_images: int
    num_test_images: int
    notes: Mapping[str, str] = field(default_factory=dict)

    def num_images(self, split: str) -> int:
        """Return the number of images of a split."""
        return self.num_train_images if split == "train" else self.num_test_images


@dataclass(frozen=True, kw_only=True)
class Place:
    """Describe where data lie: what must be on the disk, and how it gets there.

    required: glob patterns relative to root, each of which must match something; "a/*/" is any folder in a.
    package: the module whose files hold the data; it is only looked for. how_to_get: instructions for a newcomer.
    tree: the expected files, drawn. default_root: where the data usually lie; None where there is no such place. Data
    without `required` need no root. noun, alternative: what a message calls them, and what works without them.
    """

    required: tuple[str, ...] = ()
    package: str | None = None
    tree: str = ""
    how_to_get: str = ""
    default_root: Path | None = None
    noun: str = "image set"
    alternative: str = EMBEDDED_ALTERNATIVE

    def find_root(self, name: str, root: str | Path | None) -> Path:
        """Return the folder that holds the data, after a look at its upper folders only. Raises DataMissing.

        All splits must be there: a run that trains for days should not find out then that it cannot be tested.
        """
        folder = Path(root).expanduser() if root is not None else self.default_root
        if self.package is not None and find_spec(self.package) is None:
            raise DataMissing(self._message(name, f"the Python package {self.package}"))
        if not self.required:
            return folder or Path()
        if folder is None:
            raise DataMissing(self._message(name, "the folder data.root, which is not set"))
        missing = [pattern for pattern in self.required if next(folder.glob(pattern), None) is None]
        if missing:
            raise DataMissing(self._message(name, f"{', '.join(missing)} in the folder {folder}"))
        return folder

    def _message(self, name: str, looked_for: str) -> str:
        tree = f"Expected tree:\n{self.tree}\n" if self.tree else ""
        return (
            f"The {self.noun} {name} is missing.\n"
            f"Looked for: {looked_for}.\n"
            f"{tree}"
            f"How to get it: {self.how_to_get}\n"
            f"Without it: {self.alternative}"
        )


@dataclass(frozen=True, kw_only=True)
class Source(Place):
    """Describe one image set: how to open it, and where it lies.

    open: (root, split) -> image set. table: the numbers of the paper's Table 4, for the sets that are in it.
    """

    open: Callable[[Path, str], ImageSet]
    table: TableCounts | None = None
