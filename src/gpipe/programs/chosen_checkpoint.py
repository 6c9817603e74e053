"""Find the checkpoint that a setting names, and refuse one that does not fit the run."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gpipe.checkpoint import folder as checkpoints
from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.format import read_metadata
from gpipe.checkpoint.manifest import Manifest
from gpipe.config import ConfigError, RunConfig, to_plain
from gpipe.records import RESUMED_MAY_DIFFER, differences

CLASS_NAMES = "class_names"  # the key beside the settings; a model's label is an index into these names


def check_checkpoints(run: RunConfig) -> None:
    """Refuse a missing checkpoint, and to resume from one that has other settings or nothing left to train."""
    if run.init_from is not None:
        choose_checkpoint("init_from", run.init_from)
    if (value := run.trainer.resume_from) is not None:
        saved = Manifest.read(choose_checkpoint("trainer.resume_from", value))
        if found := differences(saved.config, to_plain(run), RESUMED_MAY_DIFFER):
            raise ConfigError(
                f"trainer.resume_from is {value}, which was trained with other settings ({'; '.join(found)}): set them "
                "as they are there, or start from its weights alone with init_from."
            )
        trainer, position = run.trainer, saved.position
        # Training would end at once, without saving a checkpoint. Patience is not checked: it starts anew.
        limits = ("num_epochs", trainer.num_epochs, position.epoch), ("max_steps", trainer.max_steps, position.step)
        for name, most, reached in limits:
            if most is not None and reached >= most:
                raise ConfigError(
                    f"trainer.resume_from is {value}, which has finished step {position.step}: nothing is left to "
                    f"train with trainer.{name}={most}: raise it."
                )


def check_earlier(run: RunConfig, folder: Path) -> None:
    """Refuse a run's folder that has checkpoints of another training."""
    earlier = newest_manifest(folder)
    if earlier is not None and (found := differences(earlier.config, to_plain(run))):
        raise ConfigError(
            f"{folder} has checkpoints that were trained with other settings ({'; '.join(found)}): set them as they "
            "are there, or choose another folder."
        )


def newest_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the newest good checkpoint in a run's folder; None if there is none."""
    for path in checkpoints.list_newest_first(folder / "checkpoints"):
        with suppress(DamagedCheckpoint):  # the trainer reports it
            return Manifest.read(path)
    return None


def find_kindred(setting: str, value: str, kept: Mapping[str, str]) -> Path:
    """Find a checkpoint, and refuse one that was saved with other files than this run's."""
    path = choose_checkpoint(setting, value)
    saved = read_metadata(path) if path.is_file() else Manifest.read(path).config
    refuse_other_files(f"{setting} is {value}", saved, kept)
    return path


def refuse_other_files(subject: str, saved: Mapping[str, Any], kept: Mapping[str, str]) -> None:
    """Raise ConfigError if a checkpoint, which `subject` names, was `saved` with other files than `kept`."""
    for name, digest in kept.items():
        if (other := saved.get(name)) != digest:
            what = name.removesuffix("_sha256")
            raise ConfigError(
                f"{subject}, whose {what} has the SHA-256 {str(other)[:12]}..., but this run's has "
                f"{digest[:12]}...: set data.{what} to the one in the folder of the checkpoint's run."
            )


def choose_checkpoint(setting: str, value: str) -> Path:
    """Return the checkpoint that a setting names; for init_from, it may be an exported file.

    Of a run's checkpoints, the setting `checkpoint` means the best one, if there is one, and the other settings mean
    the latest. See `gpipe.checkpoint.folder.find_checkpoint` for the value.
    """
    path = Path(value)
    if path.suffix == ".safetensors" and path.is_file():
        if setting == "init_from":
            return path
        raise ConfigError(
            f"{setting} is {value}, a file that has weights alone, expected a run's folder or a checkpoint's: "
            "name that, or start a training from the file with init_from."
        )
    if (found := checkpoints.find_checkpoint(path, prefer_best=setting == "checkpoint")) is None:
        if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{setting} is {value}, a run without a checkpoint yet: wait for one, or name another.")
        raise ConfigError(f"{setting} is {value}, which has no checkpoint: name a run's folder or a checkpoint's.")
    return found


def read_class_names(manifest: Manifest) -> list[str] | None:
    """Return the names by label; None if labels have no names."""
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
