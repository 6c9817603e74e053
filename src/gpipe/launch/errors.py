"""What a user sees of an error: its message, once, however many processes fail of it. Nothing here imports torch."""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpipe.environment_secrets import redact

ERROR_FILE = "error.txt"
# A launcher's message has the log of its job in it, between lines of dashes.
_LOG = re.compile(r"\n-{20,}\n(?P<content>.*?)(\n-{20,}\n|\Z)", re.DOTALL)


@contextmanager
def one_message(
    folder: Path | None = None, debug: bool = False, unless: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Turn an error into its message on stderr and an exit with status 1 (130 for Ctrl-C).

    folder: gets error.txt with the traceback; of several processes that fail only the first one to write it speaks.
        None is for errors before the processes of a run share a folder: the first one of each host speaks.
    debug: print the traceback instead of the message, as the environment variable HYDRA_FULL_ERROR=1 does too.
    unless: errors that somebody else turns into messages.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except unless:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run here
        _speak(error, folder, debug or os.environ.get("HYDRA_FULL_ERROR") == "1")
        raise SystemExit(1) from None


@contextmanager
def one_message_from_hydra() -> Iterator[None]:
    """Turn errors around a run, of Hydra and its launchers, into messages; Hydra prints a traceback of most of them.

    Such are a typo in a YAML file, a place where no folder can be made, and a cluster that is not there.
    """
    from hydra._internal import utils
    from hydra.errors import CompactHydraException

    report = utils.run_and_report

    def run_and_report(func: Callable[[], Any]) -> Any:
        def run() -> Any:
            with one_message(unless=CompactHydraException):
                return func()

        return report(run)

    utils.run_and_report = run_and_report
    try:
        yield
    finally:
        utils.run_and_report = report


def forget_errors(folder: Path) -> None:
    """Take away what an earlier try left in its folder, which would silence this one."""
    (folder / ERROR_FILE).unlink(missing_ok=True)


def _speak(error: Exception, folder: Path | None, full: bool) -> None:
    """Print an error's message, unless another process of the run has spoken; keep its traceback.

    A library may put into its message what it was given, even a key: secrets of the environment are left out.
    """
    trace = redact(traceback.format_exc())
    message = redact(_sentence(error) + "".join(f"\n(in {note})" for note in getattr(error, "__notes__", ())))
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / ERROR_FILE).open("x", encoding="utf-8") as file:
                file.write(f"error: {message}\n\n{trace}")
            message += f"\n(traceback: {folder / ERROR_FILE})"
        except FileExistsError:
            return
        except OSError as full_disk:  # which may be what the message is about
            message += f"\n(the traceback could not be kept: {full_disk})"
    elif not _is_first():
        return
    print(trace if full else f"error: {message}", file=sys.stderr, flush=True)


def _is_first() -> bool:
    """Say whether no other process of this host and this try has spoken.

    torch's agent gives each process a file for its error, in a folder that those of a host and a try have in common.
    """
    own_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        if own_file:
            (Path(own_file).parents[1] / ERROR_FILE).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # nobody can tell
        return True
    return True


def _sentence(error: Exception) -> str:
    """Return what an error says; where it is not one that speaks in sentences, with its name in front."""
    if (mark := getattr(error, "problem_mark", None)) is not None:  # a YAML parser's
        problem = getattr(error, "problem", None) or "this is no YAML"
        return f"{mark.name}, line {mark.line + 1}: {problem}: correct it there, or in the line before."
    if isinstance(error, OSError) and error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"no access to {error.filename} ({error.strerror}): change its permissions, or start where you may write."
        )
    if type(error).__name__ == "DistStoreError":  # torch's, which takes seconds to load
        return f"another process did not come in time ({error}): see what keeps it, or raise pipeline.timeout_seconds."
    speaks = type(error) is ValueError or type(error).__module__ != "builtins"
    message = _LOG.sub(_last_line, str(error))
    return message if speaks and message else f"{type(error).__name__}: {message}"


def _last_line(log: re.Match[str]) -> str:
    lines = log["content"].strip().splitlines()
    return f"\n{lines[-1].strip()}\n" if lines else "\n"
