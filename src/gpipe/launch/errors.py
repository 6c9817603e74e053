"""Print each error as one message, however many processes raise it. Nothing here imports torch."""

import errno
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpipe.environment_secrets import redact

ERROR_FILE = "error.txt"
_TELLER_SECONDS = 3.0  # long enough for Weights & Biases to be told of the end
# A launcher's message contains the log of its job, between lines of dashes.
_LOG = re.compile(r"\n-{20,}\n(?P<content>.*?)(\n-{20,}\n|\Z)", re.DOTALL)

# Hydra's messages.
_UNKNOWN = re.compile(r"Could not override '(?P<key>[^']+)'")
_ABSENT = re.compile(
    r"(In '[^']+': )?Could not (find|load) '(?P<group>[^']+)/(?P<name>[^'/]*)'\.?\n"
    r"(\nAvailable options in '[^']+':\n(?P<there>[^:]*))?\n?Config search path"
)
# Those that need no more than other words.
_SENTENCES = {
    r"Ambiguous value for argument '\+*([^=]+)=(.*)'\n":
        "{0} has the values {1}: add -m to train.py for a run with each, write '{0}=[{1}]' for a list, or "
        "\"{0}='{1}'\" for a text.",
    r"BasicSweeper does not support sweep type : INTERVAL_SWEEP":
        "interval(...) is a value of a sweep, but only a search draws from it: write the values to try, separated by "
        "commas, or add +search=learning_rate.",
    r"Multiple values for ([^.]+)\.": "{0} is chosen already: write {0}=..., without a plus.",
    r"Cannot find primary config '(.*?)(?:\.yaml)?'":
        "--config-name is {0}, but neither conf/ nor the folder of --config-dir has a file {0}.yaml: correct the name, "
        "or leave --config-name out.",
    r"Primary config directory not found\.\nCheck that the config directory '(.*)' exists":
        "--config-path is {0}, which is not a folder: correct it, or leave --config-path out.",
    # A misspelt parent, or a file of another program.
    r"In '([^']*)': Could not load '([^'/]*)'":
        "{0}.yaml inherits from {1}, which this program does not have: correct its defaults list, or leave out what "
        "chose it, such as --config-name.",
}  # fmt: skip
# Those of the system about a file: its name, and the system's own words.
_FILE_SENTENCES = {
    (errno.EACCES, errno.EPERM, errno.EROFS):
        "no access to {} ({}): change its permissions, or start where you may write.",
    (errno.EEXIST, errno.ENOTDIR, errno.ENOENT): "{} cannot be made or opened ({}): name another file or folder.",
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        "{} cannot be written ({}): make room there, or raise the limit, and start the same command again.",
}  # fmt: skip


@contextmanager
def report_errors(folder: Path | None = None, debug: bool = False) -> Iterator[None]:
    """Print the message of an error to stderr and exit with status 1 (130 after Ctrl-C).

    Args:
        folder: gets error.txt with the traceback; of several processes that fail, only the first to write it prints.
            Pass None before the processes of a run share a folder: then the first process of each host prints.
        debug: print the traceback instead of the message, as the environment variable HYDRA_FULL_ERROR=1 does.
    """
    was_there = folder is not None and folder.is_dir()
    try:
        yield
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:  # noqa: BLE001 - any error ends the run here
        is_gone = was_there and folder is not None and not folder.is_dir()  # moved or deleted: do not create it again
        _report(error, None if is_gone else folder, debug or os.environ.get("HYDRA_FULL_ERROR") == "1")
        raise SystemExit(1) from None


def _report(error: Exception, folder: Path | None, full: bool) -> None:
    """Print an error's message, unless another process of the run has printed one; write its traceback.

    A library's message may repeat its arguments, even a key, so secrets of the environment are redacted.
    """
    if getattr(error, "told", False):
        _wait_for_teller(folder)
    trace = redact(traceback.format_exc())
    message = redact(_make_sentence(error) + "".join(f"\n(in {note})" for note in getattr(error, "__notes__", ())))
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_new(folder / ERROR_FILE, f"error: {message}\n\n{trace}")
            message += f"\n(traceback: {folder / ERROR_FILE})"
        except FileExistsError:
            return
        except OSError as full_disk:  # perhaps the error itself
            if not _is_first_to_report():
                return
            message += f"\n(the traceback could not be written: {full_disk})"
    elif not _is_first_to_report():
        return
    print(trace if full else f"error: {message}", file=sys.stderr, flush=True)


def _write_new(path: Path, text: str) -> None:
    """Write a new file; if the disk is full, leave none."""
    with path.open("x", encoding="utf-8", errors="backslashreplace") as file:  # a name may be no UTF-8
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def _wait_for_teller(folder: Path | None) -> None:
    """Let the process where the error happened report it, if it does so in time: it has the traceback and the type.

    That process notifies the others and cleans up first, so they often get here before it.
    """
    reports = [path for path in (folder and folder / ERROR_FILE, _find_first_report()) if path]
    deadline = time.monotonic() + _TELLER_SECONDS
    while time.monotonic() < deadline and not any(path.exists() for path in reports):
        time.sleep(0.02)


def _is_first_to_report() -> bool:
    """Return whether no other process of this host and this try has reported an error."""
    if (first := _find_first_report()) is None:
        return True
    try:
        first.touch(exist_ok=False)
    except OSError as error:  # on a full disk it is unknown: better twice than never
        return not isinstance(error, FileExistsError)
    return True


def _find_first_report() -> Path | None:
    """Return the path of the file that the first process to report an error creates, per host and try.

    torch's agent gives each process a file for its error, in a folder that the processes of a host and a try share.
    """
    own_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(own_file).parents[1] / ERROR_FILE if own_file else None


def _make_sentence(error: Exception) -> str:
    """Return an error's message, after the name of its class unless the message is a sentence."""
    if (mark := getattr(error, "problem_mark", None)) is not None:  # a YAML parser's
        problem = getattr(error, "problem", None) or "this is not YAML"
        return f"{mark.name}, line {mark.line + 1}: {problem}: correct it there, or in the line before."
    if isinstance(error, OSError) and (said := _explain_os_error(error)) is not None:
        return said
    if type(error).__name__ == "DistStoreError":  # torch's class, which takes seconds to import
        remedy = "find out what delays it, or raise pipeline.timeout_seconds"
        return f"another process did not answer in time ({error}): {remedy}."
    is_sentence = type(error) is ValueError or type(error).__module__ != "builtins"
    message = _LOG.sub(_last_line, str(error))
    if message == "No trials are completed yet.":  # Optuna's
        return "no trial of the search was completed: the outcome of each is above."  # other processes run them
    if (said := _explain_override(error, message)) is not None:
        return said
    if type(error).__module__ == "hydra.errors" and error.__cause__ is not None:  # the cause says what is wrong
        reason = str(error.__cause__).partition("\n")[0]
        word = message.removeprefix("Error merging override ")
        message = f"{word}: {reason}: correct it." if word != message else f"{message}\n{reason}".strip()
    message = message.partition("\n\nConfig search path:")[0]
    return message if is_sentence and message else f"{type(error).__name__}: {message}"


def _explain_override(error: Exception, message: str) -> str | None:
    """Say which word of the command line Hydra cannot use, and what to write; None for any other error."""
    if (word := getattr(error, "override", None)) is not None:  # Hydra cannot parse it
        key, is_set, value = word.partition("=")
        quoted = value.replace("'", r"\'")
        as_text = f"correct it, or write \"{key}='{quoted}'\", with both kinds of quotes"
        return f"{word} cannot be read: {as_text}." if is_set else f"{word} has no value: write {word}=... ."
    for pattern, sentence in _SENTENCES.items():
        if found := re.match(pattern, message):
            return sentence.format(*found.groups())
    if absent := _ABSENT.match(message):
        there = f", expected one of {', '.join(absent['there'].split())}" if absent["there"] else ""
        return f"{absent['group']}={absent['name']} is unknown{there}: correct its name."
    if unknown := _UNKNOWN.match(message):
        if "No match in the defaults list" in message:
            return f"{unknown['key']} is not chosen by default: write +{unknown['key']}=..., with a plus."
        from omegaconf import OmegaConf

        node, name = getattr(error.__cause__, "parent_node", None), getattr(error.__cause__, "full_key", None)
        if node is not None and OmegaConf.get_type(node) is dict:  # no schema knows its names: a library's arguments
            return f"{name} is not set yet: add it with a plus, as a separate word: +{name}=... ."
        there = f", expected one of {', '.join(sorted(map(str, node)))}" if node else ""
        group = unknown["key"].partition(".")[0]
        choice = f", or choose the {group}=... that has it" if group in ("data", "model", "optimizer") else ""
        return f"{unknown['key']} is unknown{there}: correct its name{choice}."
    return None


def _explain_os_error(error: OSError) -> str | None:
    """Say what happened to a file, and what to do; None if only the error's own words are known."""
    if error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:60]}... is too long for a file name: shorten the setting that it comes from."
    if str(error) == "AF_UNIX path too long":  # Python's own message, without an errno
        return f"{tempfile.gettempdir()} is too long for the path of a folder of sockets: set TMPDIR to a shorter one."
    for numbers, sentence in _FILE_SENTENCES.items():
        if error.filename and error.errno in numbers:
            return sentence.format(error.filename, error.strerror)
    return None


def _last_line(log: re.Match[str]) -> str:
    lines = log["content"].strip().splitlines()
    return f"\n{lines[-1].strip()}\n" if lines else "\n"
