"""Find the folder of a run: repeating a command resumes the run where it stopped.

    runs/<name>/<date>/        a run's own: an unfinished one of the same settings, or a new one
    runs/<name>/<date>-2/      the folder of another run that began in the same second
    runs/sweep-<id>/<job>/     a sweep's job has the same folder each time

A run locks its folder (gpipe.programs.folder_lock). Each session of the run loads the newest good checkpoint there
(`gpipe.programs.train.train_in_process`).
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from gpipe.config import ConfigError, Resume, RunConfig, read_yaml, to_plain
from gpipe.durable_files import locked
from gpipe.launch.errors import ERROR_FILE
from gpipe.programs.folder_lock import LOCK_FILE, FolderHeld, hold
from gpipe.records import EFFORTS, RECORD_FILE, RESUMED_MAY_DIFFER, differences, same_settings

CONFIG_FILE = "config.yaml"
_STARTS_FILE = "started_from.txt"
_OTHER_FOLDER = "choose another hydra.run.dir"


@contextmanager
def resume_folder(run: RunConfig, folder: Path, *, is_dated: bool = True) -> Iterator[Path]:
    """Lock the folder to train in until the body ends, and return it; remove it if it stays empty.

    It is the folder of the newest unfinished run with the same settings; a message names it and says how to start anew.
    Otherwise it is a new one: `folder`, or <folder>-2 and so on if that is taken. Of torchrun's processes only the
    first one searches; the others get the folder from it (gpipe.launch). If the user has named the folder, which then
    has no date in its name, no other is used.

    Raises:
        ConfigError: the folder that the user has named is in use, or has another run.
    """
    if os.environ.get("RANK", "0") != "0" or run.trainer.dry_run:
        yield folder
        return
    with ExitStack() as held:
        if is_dated:
            yield _hold_unfinished(run, folder, held) or _hold_new(folder, held)
        else:
            _hold_named(run, folder, held)
            yield folder


def _hold_unfinished(run: RunConfig, folder: Path, held: ExitStack) -> Path | None:
    """Lock and return an unlocked unfinished run of the same settings beside `folder`; None if there is none.

    Runs with a checkpoint come first, then the newest.
    """
    if run.trainer.resume is Resume.never:
        return None
    earlier = [path.parent for path in folder.parent.glob(f"*/{CONFIG_FILE}") if is_unfinished(path.parent, run)]
    for path in sorted(earlier, key=lambda path: (_has_saved(path), path), reverse=True):
        with ExitStack() as tried:
            try:
                tried.enter_context(hold(path))
            except FolderHeld as busy:
                print(f"{busy} and has the same settings: this run gets its own folder")
                continue
            if is_unfinished(path, run):  # it may have finished before it was locked
                held.push(tried.pop_all())
                _announce(path, "trainer.resume=never starts anew")
                return path
    if run.trainer.resume_from is None:
        _mention_resumable(to_plain(run), folder.parent)
    return None


def _mention_resumable(own: dict[str, Any], runs: Path) -> None:
    """Name the newest unfinished run whose state this one could take, such as one with another number of stages."""
    for path in sorted((path.parent for path in runs.glob(f"*/{CONFIG_FILE}")), reverse=True):
        saved = {} if (path / RECORD_FILE).exists() or not _has_saved(path) else read_yaml(path / CONFIG_FILE)
        if (found := differences(saved, own)) and not differences(saved, own, RESUMED_MAY_DIFFER):
            with suppress(FolderHeld, OSError), hold(path):  # it may be another user's
                remedy = f"trainer.resume_from={path} starts from its state"
                print(f"{path} is unfinished, but {'; '.join(found)}: this run is a new one ({remedy})")
                return


def _hold_new(folder: Path, held: ExitStack) -> Path:
    """Lock and return a new folder."""
    for number in count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FolderHeld), ExitStack() as tried:
            tried.callback(_remove_if_empty, path)
            tried.enter_context(hold(path, is_new=True))
            held.push(tried.pop_all())
            return path
    raise AssertionError


def _hold_named(run: RunConfig, folder: Path, held: ExitStack) -> None:
    """Lock the folder that the user has named, unless it has another run or is the root of the file system."""
    if folder.resolve() == Path(folder.anchor or "/"):
        raise ConfigError(f"hydra.run.dir is {folder.resolve()}, expected a folder of the run's own: name a new one.")
    held.callback(_remove_if_empty, folder)
    try:
        held.enter_context(hold(folder))
    except FolderHeld as busy:
        raise ConfigError(f"{busy}: wait until that has ended, or {_OTHER_FOLDER}.") from None
    if not any((folder / name).exists() for name in (CONFIG_FILE, RECORD_FILE, "checkpoints")):
        return
    if run.trainer.resume is Resume.never:
        raise ConfigError(f"{folder} has a run, and trainer.resume is never: {_OTHER_FOLDER}, or remove that one.")
    if (folder / RECORD_FILE).exists():
        raise ConfigError(f"{folder} has a run that is finished: {_OTHER_FOLDER}, or remove that one.")
    if (folder / CONFIG_FILE).exists() and not is_unfinished(folder, run):
        found = differences(read_yaml(folder / CONFIG_FILE), to_plain(run))
        raise ConfigError(
            f"{folder} has a run of other settings ({'; '.join(found) or f'its {CONFIG_FILE} cannot be read'}): "
            f"set them as they are there, or {_OTHER_FOLDER}."
        )
    _announce(folder, f"{_OTHER_FOLDER} to start anew")


def _announce(folder: Path, remedy: str) -> None:
    (folder / ERROR_FILE).unlink(missing_ok=True)
    print(f"resuming {folder}, an unfinished run with the same settings ({remedy})")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        os.removedirs(folder)


def _has_saved(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def name_runs(run: RunConfig, sweep: Path | None = None) -> RunConfig:
    """Return the settings with each folder of runs to start from replaced by one run (`find_run`).

    The jobs of a sweep, in whose folder `sweep` they are, all start from the run that the first one finds.
    """
    named = (run.init_from, run.trainer.resume_from)
    if named == (None, None):
        return run
    init_from, resume_from = (None if value is None else _find_run(value, sweep) for value in named)
    return replace(run, init_from=init_from, trainer=replace(run.trainer, resume_from=resume_from))


def _find_run(named: str, sweep: Path | None) -> str:
    """Return the run that a folder of runs stands for; in a sweep, the one that the first job found."""
    from gpipe.checkpoint.folder import find_run  # loads torch

    found = str(find_run(Path(named)))
    if sweep is None or found == named:
        return found
    with locked(path := sweep / _STARTS_FILE):
        first = _read_starts(path).get(named)
        if first is None:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps([named, found])}\n")
    if first is not None and not Path(first).exists():
        raise ConfigError(
            f"{named} is {first} in this sweep, which no longer exists, expected the run from which its other jobs "
            f"started: put it back, or name {found} to start all of them anew."
        )
    if first not in (None, found):
        print(f"{named} is {first}, from which this sweep started, not the newer {found}: name that to start anew")
    return first or found


def _read_starts(path: Path) -> dict[str, str]:
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # a line of a process that was killed while writing
            name, run = json.loads(line)
            found[name] = run
    return found


def is_unfinished(folder: Path, run: RunConfig) -> bool:
    """Return whether a folder has an unfinished run with the same settings."""
    if (folder / RECORD_FILE).exists() or not (folder / CONFIG_FILE).exists():
        return False
    return same_settings(read_yaml(folder / CONFIG_FILE), to_plain(run), EFFORTS)


def clear(folder: Path, run: RunConfig) -> None:
    """Prepare a job's locked folder: move the files of a run with other settings aside."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
    if not (folder / CONFIG_FILE).exists() or (run.trainer.resume is Resume.auto and is_unfinished(folder, run)):
        return
    aside = folder.parent / "set_aside" / f"{folder.name}.{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    aside.mkdir(parents=True)
    # The settings move last: while they are here, the move is not complete.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if path.name != LOCK_FILE:
            path.rename(aside / path.name)
