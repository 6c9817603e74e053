"""The log of a run: metrics.jsonl is the record, Weights & Biases its mirror."""

import json
import math
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import wandb

from gpipe.durable_files import write_flushed
from gpipe.training.endings import Stopped

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_id.txt"
OUTCOME = "outcome"
_RUN_ID = re.compile(r"[0-9a-z]{1,32}")
_MODES = ("offline", "online", "disabled")
_TEARDOWN_SECONDS = 5.0


class Tracker:
    """Append one JSON object per line to `folder/metrics.jsonl`, at once, and mirror it to Weights & Biases.

    The mirror never ends a run: when it fails for any reason, the run goes on without it after one warning on stderr.

    Use it with `with`, so that a run that fails is closed as failed. With `enabled` False, as on all processes but one,
    every call does nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        enabled: bool = True,
        mode: str = "offline",
        project: str = "gpipe",
        group: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resumed: Path | None = None,
    ) -> None:
        """Begin in `folder`, or continue there.

        Args:
            folder: of the run.
            enabled: whether this process tracks.
            mode: offline (no account needed), online or disabled.
            project: of Weights & Biases.
            group: the experiment.
            name: the run.
            config: the composed configuration as a plain dict.
            resumed: the folder of the run that this one resumes: its log is continued, and Weights & Biases sees one
                run.
        """
        if mode not in _MODES:
            raise ValueError(f"tracking.mode is {mode!r}: choose one of {', '.join(_MODES)}.")
        self._folder = folder
        self._path = folder / METRICS_FILE
        self._earlier = None if resumed is None else resumed / METRICS_FILE
        self._enabled = enabled
        self._run: wandb.Run | None = None
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if mode == "disabled":
            return
        run_id = _run_id(folder) or _run_id(resumed) or secrets.token_hex(4)
        write_flushed(folder / RUN_ID_FILE, run_id + "\n")
        _set_environment(folder, is_offline=mode == "offline")
        # Without these settings arguments, console output, source files, the names of the installed packages and the
        # host's name land in its folder.
        settings = wandb.Settings(
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            save_code=False,
            console="off",
            host="",
        )
        try:
            self._run = wandb.init(
                mode="online" if mode == "online" else "offline",
                dir=str(folder),
                project=project,
                group=group,
                name=name,
                id=run_id,
                resume="allow" if mode == "online" else None,  # offline, `wandb sync` puts the parts of an id together
                config=dict(config or {}),
                settings=settings,
            )
        except Exception as error:  # noqa: BLE001 - as in `_mirror`
            self._give_up(error)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write `values`, which must have "step", as one line; numbers that are not finite become null."""
        if not self._enabled:
            return
        if "step" not in values:
            raise ValueError(f"the values {sorted(values)} lack 'step', which orders the lines: add it.")
        finite = self._write(values)
        known = {key: value for key, value in finite.items() if value is not None}
        self._mirror(lambda run: run.log(known, step=values["step"]))

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table, such as the plan, as one line {"step", name: rows}; all rows have the same keys."""
        if not self._enabled:
            return
        finite = self._write({"step": step, name: rows})[name]
        self._mirror(lambda run: run.log({name: _table(finite)}, step=step))

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write the path of a picture in the run's folder as one line {"step", name: path}."""
        if not self._enabled:
            return
        self._write({"step": step, name: str(path.relative_to(self._folder))})
        self._mirror(lambda run: run.log({name: wandb.Image(str(path))}, step=step))

    def begin(self, plan: Sequence[Mapping[str, Any]]) -> None:
        """Write the plan if the log is empty."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            self.log_table(0, "plan", plan)

    def _write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, and return its values."""
        finite: dict[str, Any] = jsonable(values)
        # Opened for each line: there is nothing to flush, lose or close.
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite, allow_nan=False) + "\n")
        except OSError as error:  # a full disk's has no path
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        return finite

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, which a run that resumes there writes again, and a truncated last line.

        The outcome is dropped in any case: the run will have another. A new run takes over the lines of the run that it
        resumes.
        """
        logs = [path for path in (self._path, self._earlier) if path is not None and path.exists()]
        if not self._enabled or not logs:
            return
        kept = [line for line in logs[0].read_bytes().split(b"\n") if _is_until(line, step)]
        write_flushed(self._path, b"".join(line + b"\n" for line in kept))

    def close(self, *, failed: bool = False) -> None:
        """End the W&B run; nothing is mirrored after it."""
        self._mirror(lambda run: run.finish(exit_code=int(failed)))
        self._run = None

    def _mirror(self, give: Callable[[wandb.Run], None]) -> None:
        """Give something to W&B, until its first failure."""
        if self._run is None:
            return
        try:
            give(self._run)
        except Exception as error:  # noqa: BLE001 - its process may be killed, its disk full, its account closed
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Continue without W&B, after a warning with the reason."""
        self._run = None
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(
            f"warning: Weights & Biases failed ({reason}): the run goes on with {self._path} alone; "
            "tracking=disabled turns it off.",
            file=sys.stderr,
            flush=True,
        )
        _forget_service()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None and not issubclass(kind, Stopped))


def jsonable(value: Any) -> Any:
    """Return `value` with NaN and infinities as None, which JSON has no numbers for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _set_environment(folder: Path, *, is_offline: bool) -> None:
    """Let wandb write only into the run's folder, report no errors to its makers, and print nothing.

    Only the process has settings for these, not a run. Online, the account's settings stay where they are.
    """
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    for kind in ("DATA", "CACHE", "CONFIG") if is_offline else ("DATA", "CACHE"):
        os.environ[f"WANDB_{kind}_DIR"] = str((folder / "wandb" / kind.lower()).resolve())


def _forget_service() -> None:
    """Let the next run of this process, such as a sweep's next job, restart wandb's own process."""
    thread = threading.Thread(target=_tear_down, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(_TEARDOWN_SECONDS)  # teardown waits for that process, which may hang


def _tear_down() -> None:
    with suppress(Exception, SystemExit):  # teardown exits the program if its process was killed
        service: Any = wandb.setup()._connection
        try:
            wandb.teardown()
        finally:
            service._proc.join()  # private: teardown itself does not wait for a killed process


def _is_until(line: bytes, step: int) -> bool:
    """Tell whether a line belongs to the steps up to `step`; a damaged line belongs to none."""
    try:
        values = json.loads(line)
        return int(values["step"]) <= step and OUTCOME not in values
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _run_id(folder: Path | None) -> str | None:
    """Return the Weights & Biases id that an earlier run left in its folder, None if there is none."""
    if folder is None or not (folder / RUN_ID_FILE).exists():
        return None
    text = (folder / RUN_ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if not _RUN_ID.fullmatch(text):
        raise ValueError(f"{folder / RUN_ID_FILE} has {text!r}, expected a run's id: delete the file.")
    return text


def _table(rows: Sequence[Mapping[str, Any]]) -> wandb.Table:
    data = [[_cell(value) for value in row.values()] for row in rows]
    return wandb.Table(columns=list(rows[0]), data=data, allow_mixed_types=True)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
