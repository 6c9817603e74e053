"""The folder of a run's checkpoints: list them, find the latest and the best, and delete old ones."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import MANIFEST, STEP_FOLDER, Manifest
from gpipe.durable_files import flush, write_flushed
from gpipe.records import RECORD_FILE

LATEST = "latest"
BEST = "best"
# A checkpoint that is being replaced, until its replacement is complete.
_OLD = re.compile(r"\.(step-\d{8,18})\.old")
# What a process that was killed may have left behind.
_REST = re.compile(r"\.step-\d{8,18}\.(partial-[0-9a-f]+-\d+|deleted)")


def name_step(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def find_latest(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` in `folder` names or, if that file is lost, the last complete one.

    None if nothing was saved yet.
    """
    complete = [path for path in _list_steps(folder) if (path / MANIFEST).exists()]
    return _follow(folder / LATEST) or max(complete, key=_parse_step, default=None)


def find_best(folder: Path) -> Path | None:
    """Return the checkpoint with the lowest loss in the main evaluation; None if none was saved after an evaluation."""
    return _follow(folder / BEST)


def find_checkpoint(path: Path, *, prefer_best: bool = False) -> Path | None:
    """Return the checkpoint that a path means; None if there is none.

    Args:
        path: a checkpoint's folder, a pointer to one (`best`), a run's folder, its folder of checkpoints, or a folder
            of runs, from which `find_run` chooses one.
        prefer_best: take a run's best checkpoint, if there is one, instead of its latest.
    """
    if len(path.parts) < 2 or ".." in path.parts:  # the run's folder is looked for two folders up
        path = Path(os.path.normpath(path.absolute()))
    if path.name in (LATEST, BEST) and path.is_file():
        return _follow(path)
    if (path / MANIFEST).exists():
        return path
    run = find_run(path)
    for folder in (run / "checkpoints", run):
        if (found := (find_best(folder) if prefer_best else None) or find_latest(folder)) is not None:
            return found
    return None


def find_run(path: Path) -> Path:
    """Return, of a folder of runs, the finished one that saved last, else the unfinished one; other paths unchanged."""
    if any((path / name).exists() for name in ("checkpoints", LATEST, MANIFEST)):
        return path
    saved = path.glob(f"*/checkpoints/step-*/{MANIFEST}")

    def rank(manifest: Path) -> tuple[bool, bool, float]:
        is_finished = (manifest.parents[2] / RECORD_FILE).exists()
        return is_finished, is_finished or not _began_in(path, manifest), manifest.stat().st_mtime

    newest = max(saved, key=rank, default=None)
    return path if newest is None else newest.parents[2]


def _began_in(folder: Path, manifest: Path) -> bool:
    """Return whether a run started from a run in this folder; repeating its command must not start from itself."""
    with suppress(CheckpointError):
        config = Manifest.read(manifest.parent).config
        origins = config.get("init_from"), config.get("trainer", {}).get("resume_from")
        return any(value is not None and Path(value).resolve().parent == folder.resolve() for value in origins)
    return False


def list_newest_first(folder: Path) -> list[Path]:
    """Return the latest checkpoint and those of earlier steps, damaged ones too.

    Those of later steps are left out: the run went back and continued differently.
    """
    latest = _follow(folder / LATEST)
    steps = _list_steps(folder)
    if latest is not None:
        steps = {path: step for path, step in steps.items() if step < _parse_step(latest)}
        steps[latest] = _parse_step(latest)
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def clean(folder: Path) -> None:
    """Create the folder, and remove what interrupted saves have left in it; no other process may write there."""
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
    """Give a written checkpoint its name, point `latest` to it, and `best` if it is the best, and delete the oldest.

    The folder is valid after each step: the new checkpoint is complete before anything points to it or is deleted.
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
    steps = sorted((step <= _parse_step(path), step, other) for other, step in _list_steps(folder).items())
    best = find_best(folder)
    for _, _, other in steps[:-keep]:
        if other != best:
            _delete(other)


def _delete(path: Path) -> None:
    """Delete a checkpoint; it is renamed first, because half a checkpoint must not keep the name."""
    deleted = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    path.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def _list_steps(folder: Path) -> dict[Path, int]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {path: _parse_step(path) for path in paths if STEP_FOLDER.fullmatch(path.name)}


def _parse_step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _follow(pointer: Path) -> Path | None:
    if not pointer.exists():
        return None
    with pointer.open("rb") as file:
        name = file.read(100).decode("ascii", "replace").strip()
    if not STEP_FOLDER.fullmatch(name):
        raise CheckpointError(f"{pointer} says {name!r}, which names no checkpoint: write a folder's name into it.")
    return pointer.parent / name
