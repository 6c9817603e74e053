"""The same command again goes on where it stopped: which folder of a run that is.

    runs/<name>/<date>/        a run's own; the newest unfinished one of the same settings, or a new one
    runs/sweep-<id>/<job>/     a sweep's job has the same folder each time

What is there is looked for in it by each session of the run: in `gpipe.run.train`, from the newest good checkpoint.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpipe.config import Resume, RunConfig, read_yaml, to_plain
from gpipe.launch.errors import ERROR_FILE
from gpipe.results.records import RECORD_FILE, same_training

CONFIG_FILE = "config.yaml"


@contextmanager
def continued(run: RunConfig, folder: Path) -> Iterator[Path]:
    """Return the folder to train in: that of an unfinished run of the same settings, or `folder`, which is a new one.

    Says so, and how to start anew. While the body runs, no other process takes the folder for one that was left.
    torchrun's processes learn the folder of the first one, which alone looks for it (gpipe.launch).
    """
    if os.environ.get("RANK", "0") != "0" or run.trainer.dry_run:
        yield folder
        return
    found = None
    if run.trainer.resume is Resume.auto:
        earlier = sorted((path.parent for path in folder.parent.glob(f"*/{CONFIG_FILE}")), reverse=True)
        for path in earlier:
            if is_unfinished(path, run) and (held := _hold(path)) is not None:
                found = path
                break
    if found is None:
        found, held = folder, _hold(folder)
    else:
        (found / ERROR_FILE).unlink(missing_ok=True)
        print(f"going on in {found}, which has the same settings and no end (trainer.resume=never starts anew)")
    try:
        yield found
    finally:
        if held is not None:
            os.close(held)


def is_unfinished(folder: Path, run: RunConfig) -> bool:
    """Say whether a folder has a run of the same settings that did not come to its end."""
    if (folder / RECORD_FILE).exists() or not (folder / CONFIG_FILE).exists():
        return False
    return same_training(read_yaml(folder / CONFIG_FILE), to_plain(run))


def clear(folder: Path, run: RunConfig) -> None:
    """Make a job's folder fit to train in: what a run of other settings left there is set aside; nothing is lost."""
    (folder / ERROR_FILE).unlink(missing_ok=True)
    if not (folder / CONFIG_FILE).exists() or (run.trainer.resume is Resume.auto and is_unfinished(folder, run)):
        return
    aside = folder.parent / "set_aside" / f"{folder.name}.{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    aside.parent.mkdir(exist_ok=True)
    folder.rename(aside)
    folder.mkdir()


def _hold(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; None where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # such as of NFS, which locks no folders: nobody can tell there
        pass
    return descriptor
