"""The class names that a checkpoint stores: a model's label is an index into them."""

from collections.abc import Sequence
from itertools import zip_longest

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Manifest
from gpipe.config import ConfigError

CLASS_NAMES = "class_names"  # the key beside the settings
CLASSES_FILE = "classes.txt"  # in a run's folder, for people


def read_class_names(manifest: Manifest) -> list[str] | None:
    """Return the names by label; None if labels have no names.

    Raises:
        CheckpointError: they are not a list of names.
    """
    names = manifest.config.get(CLASS_NAMES)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(
            f"the {CLASS_NAMES} of the checkpoint are not a list of names: restore its manifest.json."
        )
    return names


def describe_other_labels(place: str, manifest: Manifest, class_names: Sequence[str] | None) -> str | None:
    """Describe the first label whose class in the checkpoint at `place` differs from the data's; None if all agree."""
    saved = read_class_names(manifest)
    if saved is not None and class_names is not None:
        for label, (there, here) in enumerate(zip_longest(saved, class_names)):
            if there != here:
                return f"class {label} is {there or 'none'} in {place}, and {here or 'none'} in the data"
    return None


def refuse_other_labels(place: str, manifest: Manifest, class_names: Sequence[str] | None) -> None:
    """Refuse to resume from a checkpoint whose labels mean other classes than the data's."""
    if (other := describe_other_labels(place, manifest, class_names)) is not None:
        raise ConfigError(f"{other}: resume with the same data, or start another run (name=<another>).")
