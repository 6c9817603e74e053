"""The folder of a run's checkpoints: which there are, which is the latest and the best, and which are given up."""

import re
import shutil
from pathlib import Path

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import MANIFEST, STEP_FOLDER
from gpipe.durable_files import flush, write_flushed

LATEST = "latest"
BEST = "best"
# A checkpoint that another takes the place of, until that one is there.
_OLD = re.compile(r"\.(step-\d{8,18})\.old")
# What a process that was killed may have left behind.
_REST = re.compile(r"\.step-\d{8,18}\.(partial-[0-9a-f]+-\d+|deleted)")


def name_of(step: int) -> str:
    """Return the name of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` in `folder` names, or where that file is lost, the last complete one.

    None where nothing was saved yet.
    """
    complete = [path for path in _steps(folder) if (path / MANIFEST).exists()]
    return _pointed(folder / LATEST) or max(complete, key=_step, default=None)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint whose main evaluation had the least loss, or None where none was saved after one."""
    return _pointed(folder / BEST)


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that is meant: by its folder, by a pointer (`best`), or the latest of a run's folder."""
    if path.name in (LATEST, BEST) and path.is_file():
        return _pointed(path)
    for folder in (path / "checkpoints", path):
        if (newest := latest_checkpoint(folder)) is not None:
            return newest
    return path if (path / MANIFEST).exists() else None


def newest_first(folder: Path) -> list[Path]:
    """Return the latest checkpoint and those of earlier steps, whether they are good or not.

    Those of later steps are not among them: the run went back and came another way.
    """
    latest = _pointed(folder / LATEST)
    steps = _steps(folder)
    if latest is not None:
        steps = {path: step for path, step in steps.items() if step < _step(latest)} | {latest: _step(latest)}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def clean(folder: Path) -> None:
    """Make the folder, and remove what saves that were cut off have left in it; no other process may write there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if match := _OLD.fullmatch(path.name):
            if (folder / match[1]).exists():
                shutil.rmtree(path)
            else:
                path.rename(folder / match[1])
        elif _REST.fullmatch(path.name):
            shutil.rmtree(path)


def publish(partial: Path, path: Path, *, keep: int, is_best: bool) -> None:
    """Give a written checkpoint its name, make it the latest, and the best if it is, and delete the oldest.

    Each step leaves the folder whole: the new checkpoint is there before anything points to it or is deleted.
    """
    folder = path.parent
    flush(partial)
    old = folder / f".{path.name}.old"
    if path.exists():  # the run went back to an earlier step and came here again
        path.rename(old)
    partial.rename(path)
    flush(folder)
    write_flushed(folder / LATEST, path.name + "\n")
    if is_best:
        write_flushed(folder / BEST, path.name + "\n")
    shutil.rmtree(old, ignore_errors=True)
    # Those of later steps are the oldest: they were saved before the run went back.
    steps = sorted((step <= _step(path), step, other) for other, step in _steps(folder).items())
    best = best_checkpoint(folder)
    for _, _, other in steps[:-keep]:
        if other != best:
            _delete(other)


def _delete(path: Path) -> None:
    """Delete a checkpoint: a half of it must not keep its name."""
    deleted = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    path.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def _steps(folder: Path) -> dict[Path, int]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {path: _step(path) for path in paths if STEP_FOLDER.fullmatch(path.name)}


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _pointed(pointer: Path) -> Path | None:
    if not pointer.exists():
        return None
    with pointer.open("rb") as file:
        name = file.read(100).decode("ascii", "replace").strip()
    if not STEP_FOLDER.fullmatch(name):
        raise CheckpointError(f"{pointer} says {name!r}, which names no checkpoint: write a folder's name into it.")
    return pointer.parent / name
