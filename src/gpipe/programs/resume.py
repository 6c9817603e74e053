"""The same command again goes on where it stopped: which folder of a run that is.

    runs/<name>/<date>/        a run's own; an unfinished one of the same settings, or a new one
    runs/<name>/<date>-2/      the folder of another run that began in the same second
    runs/sweep-<id>/<job>/     a sweep's job has the same folder each time

A run holds its folder while it lives (gpipe.programs.folder_lock). What is there is looked for in it by each session
of the run: in `gpipe.programs.train.train_in_process`, from the newest good checkpoint.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from gpipe.config import ConfigError, Resume, RunConfig, read_yaml, to_plain
from gpipe.launch.errors import ERROR_FILE
from gpipe.programs.folder_lock import LOCK_FILE, FolderHeld, hold
from gpipe.records import RECORD_FILE, differences, same_training

CONFIG_FILE = "config.yaml"
_OTHER_FOLDER = "choose another hydra.run.dir"


@contextmanager
def resume_folder(run: RunConfig, folder: Path, *, is_dated: bool = True) -> Iterator[Path]:
    """Return the folder to train in, which no other process uses until the body ends; one that stays empty is removed.

    That is the folder of the newest unfinished run of the same settings; this says so, and how to start anew. Otherwise
    it is a new one: `folder`, or <folder>-2 and so on where others have taken it.
    is_dated: `folder` is a proposal, named after the moment; False: the user has named it, so it is that one or none.
    Raises ConfigError where the named one is in use, or has another run.
    torchrun's processes learn the folder of the first one, which alone looks for it (gpipe.launch).
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
    """Hold an unfinished run of the same settings beside `folder`; None where there is none that is free.

    It is the newest one, or the newest of those that have saved something, where there are any.
    """
    if run.trainer.resume is Resume.never:
        return None
    earlier = [path.parent for path in folder.parent.glob(f"*/{CONFIG_FILE}") if is_unfinished(path.parent, run)]
    for path in sorted(earlier, key=lambda path: (_has_saved(path), path), reverse=True):
        with ExitStack() as tried:
            try:
                tried.enter_context(hold(path))
            except FolderHeld as busy:
                print(f"{busy} and has the same settings: this run is another one")
                continue
            if is_unfinished(path, run):  # still
                held.push(tried.pop_all())
                _announce(path, "trainer.resume=never starts anew")
                return path
    return None


def _hold_new(folder: Path, held: ExitStack) -> Path:
    """Hold a folder that nobody has ever used."""
    for number in count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FolderHeld), ExitStack() as tried:
            tried.callback(_remove_if_empty, path)
            tried.enter_context(hold(path, is_new=True))
            held.push(tried.pop_all())
            return path
    raise AssertionError


def _hold_named(run: RunConfig, folder: Path, held: ExitStack) -> None:
    """Hold the folder that the user has named; raises ConfigError where it has another run than this one."""
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
    print(f"going on in {folder}, which has the same settings and no end ({remedy})")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        os.removedirs(folder)


def _has_saved(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def is_unfinished(folder: Path, run: RunConfig) -> bool:
    """Say whether a folder has a run of the same settings that did not come to its end."""
    if (folder / RECORD_FILE).exists() or not (folder / CONFIG_FILE).exists():
        return False
    return same_training(read_yaml(folder / CONFIG_FILE), to_plain(run))


def clear(folder: Path, run: RunConfig) -> None:
    """Make a job's folder, which is held, fit to train in: what a run of other settings left there is set aside."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
    if not (folder / CONFIG_FILE).exists() or (run.trainer.resume is Resume.auto and is_unfinished(folder, run)):
        return
    aside = folder.parent / "set_aside" / f"{folder.name}.{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    aside.mkdir(parents=True)
    # The settings go last: as long as they are there, this is not done.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if path.name != LOCK_FILE:
            path.rename(aside / path.name)
