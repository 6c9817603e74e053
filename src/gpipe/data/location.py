"""Find data on disk, or say what is missing and how to get it."""

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError for an unknown name."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")


def refuse_root(name: str, root: str | Path | None) -> None:
    """Raise ValueError if a folder is given for a data set that reads none, instead of training on other data."""
    if root is not None:
        raise ValueError(
            f"data.root is {root}, but data.name is {name}, which reads no folder: set data.root=null, or choose "
            "the data set in that folder with data=<name>."
        )


def refuse_two_sources(share: float | None, val: Path, what: str) -> None:
    """Raise ValueError if there is a share of the training data beside other data for evaluation, at `val`."""
    if share is not None:
        raise ValueError(
            f"data.validation_share is {share:g}, but {val} {what} for evaluation: set data.validation_share=null, or "
            "rename it."
        )


def find_training_folder(root: Path) -> Path:
    """Return root/train or, if there is no such folder, root."""
    return root / "train" if (root / "train").is_dir() else root


class DataMissing(FileNotFoundError):
    """Data is missing.

    The message says what was looked for, the expected tree, how to get it, and what works without it.
    """


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a data set is, and how to get it.

    Attributes:
        required: glob patterns below the root. Each must match something; "a/*/" is any folder in a. A set without
            patterns needs no root.
        package: the Python module that holds the data; it is looked for, not imported.
        tree: a drawing of the expected files; by default the patterns.
        how_to_get: instructions for a newcomer.
        default_root: the usual folder, if there is one.
        noun: what a message calls the data.
        alternative: what works without the data.
    """

    required: tuple[str, ...] = ()
    package: str | None = None
    tree: str = ""
    how_to_get: str = ""
    default_root: Path | None = None
    noun: str = "image set"
    alternative: str = (
        "data=fashion_mnist_embedded uses photographs that come with this package; `python -m "
        "experiments.data.write_photographs <folder>` writes them as such a folder."
    )

    def find_root(self, name: str, root: str | Path | None) -> Path:
        """Return the folder that holds the data, after checking that all `required` patterns match.

        All splits must exist: a run must not find out after days that there is no test set.

        Raises:
            DataMissing: something is missing.
            ValueError: a root is given for data that needs none.
        """
        if not self.required:
            refuse_root(name, root)
        folder = Path(root).expanduser() if root else self.default_root if root is None else None
        if self.package is not None and find_spec(self.package) is None:
            raise DataMissing(self.explain(name, f"the Python package {self.package}"))
        if not self.required:
            return folder or Path()
        if folder is None:
            raise DataMissing(self.explain(name, "the folder data.root, which is not set"))
        missing = [pattern for pattern in self.required if next(folder.glob(pattern), None) is None]
        if missing:
            raise DataMissing(self.explain(name, f"{', '.join(missing)} in the folder {folder}"))
        return folder

    def explain(self, name: str, looked_for: str) -> str:
        """Return the message of DataMissing."""
        tree = self.tree or "\n".join(f"  <data.root>/{pattern}" for pattern in self.required)
        expected = f"Expected tree:\n{tree}\n" if tree else ""
        return (
            f"The {self.noun} {name} is missing.\n"
            f"Looked for: {looked_for}.\n"
            f"{expected}"
            f"How to get it: {self.how_to_get}\n"
            f"Without it: {self.alternative}"
        )
