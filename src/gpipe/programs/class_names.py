"""The names of the classes, which a checkpoint remembers: a label of its model means the class of that number."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Manifest
from gpipe.config import ConfigError

CLASS_NAMES = "class_names"  # the key beside the settings
CLASSES_FILE = "classes.txt"  # in a run's folder, for people


def read_class_names(manifest: Manifest, run_folder: Path) -> list[str] | None:
    """Return the names by label; None where labels have none.

    Checkpoints of versions before 29 November 2026 have none: those in the run's folder stand for them.

    Raises:
        CheckpointError: they are no names.
    """
    names = manifest.config.get(CLASS_NAMES)
    if names is None and (path := run_folder / CLASSES_FILE).is_file():
        return path.read_bytes().decode().removesuffix("\n").split("\n")  # other ends of lines belong to names
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(
            f"the {CLASS_NAMES} of the checkpoint are not a list of names: restore its manifest.json."
        )
    return names


def describe_other_labels(
    place: str, manifest: Manifest, run_folder: Path, class_names: Sequence[str] | None
) -> str | None:
    """Say which label means another class in the checkpoint at `place` than in the data; None where none does."""
    saved = read_class_names(manifest, run_folder)
    if saved is not None and class_names is not None:
        for label, (there, here) in enumerate(zip_longest(saved, class_names)):
            if there != here:
                return f"class {label} is {there or 'none'} in {place}, and {here or 'none'} in the data"
    return None


def refuse_other_labels(place: str, manifest: Manifest, run_folder: Path, class_names: Sequence[str] | None) -> None:
    """Refuse to go on from a checkpoint whose labels mean other classes than those of the data."""
    if (other := describe_other_labels(place, manifest, run_folder, class_names)) is not None:
        raise ConfigError(f"{other}: resume with the same data, or start another run (name=<another>).")
