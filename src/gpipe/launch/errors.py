"""What a user sees of an error: its message, once, however many processes fail of it. Nothing here imports torch."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpipe.environment_secrets import redact

ERROR_FILE = "error.txt"


@contextmanager
def one_message(folder: Path | None = None, debug: bool = False) -> Iterator[None]:
    """Turn an error into its message on stderr and an exit with status 1 (130 for Ctrl-C).

    folder: gets error.txt with the traceback; of several processes that fail only the first one to write it speaks.
        None is for errors that all processes of a host meet alike: the first of them speaks.
    debug: print the traceback instead of the message, as the environment variable HYDRA_FULL_ERROR=1 does too.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run here
        _speak(error, folder, debug or os.environ.get("HYDRA_FULL_ERROR") == "1")
        raise SystemExit(1) from None


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
    elif os.environ.get("LOCAL_RANK", "0") != "0":
        return
    print(trace if full else f"error: {message}", file=sys.stderr, flush=True)


def _sentence(error: Exception) -> str:
    """Return what an error says; where it is not one that speaks in sentences, with its name in front."""
    speaks = type(error) is ValueError or type(error).__module__ != "builtins"
    return str(error) if speaks and str(error) else f"{type(error).__name__}: {error}"
