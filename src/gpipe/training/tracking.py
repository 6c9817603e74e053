"""The log of a run: metrics.jsonl is the record, and Weights & Biases or TensorBoard may mirror it."""

import json
import math
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from gpipe.durable_files import OwnFolder, write_flushed
from gpipe.training.endings import Stopped

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "wandb_id.txt"
OUTCOME = "outcome"
LOST = "tracking_lost"
_RUN_ID = re.compile(r"[0-9a-z]{1,32}")
_WANDB = "Weights & Biases"
_PROGRAMS = {"offline": _WANDB, "online": _WANDB, "tensorboard": "TensorBoard", "disabled": "no program"}


class Mirror(Protocol):
    """Shows a run in a tracking program, and raises the program's errors."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log figures of a step, such as "train/loss" and "test/top1"."""

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, whose rows have the same keys."""

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture."""

    def log_outcome(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log the outcome of the run."""

    def close(self, *, failed: bool) -> None:
        """End the run."""


class Tracker:
    """Appends each log entry to `folder/metrics.jsonl` at once, as one line of JSON, and mirrors it to another program.

    In the mirror, the figures of training are called "train/<figure>", and those of an evaluation set called "train"
    "train_set/<figure>". The mirror never ends a run: if it fails for any reason, the run continues without it, after
    one warning on stderr and a line {"step", "tracking_lost": <reason>}.

    Use it in a `with` statement, so that a run that fails is closed as failed. With `enabled` False, as on all
    processes but one, calls do nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        enabled: bool = True,
        mode: str = "offline",
        project: str = "gpipe",
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        resumed: str | Path | None = None,
    ) -> None:
        """Begin in `folder`, or continue there.

        Args:
            folder: the run's folder.
            enabled: whether this process tracks.
            mode: offline (Weights & Biases without an account), online, tensorboard, or disabled (no mirror).
            project: the project in Weights & Biases.
            group: the experiment.
            name: the run.
            tags: the run's tags.
            config: the settings, and anything else that describes the run, as a plain dict.
            resumed: the folder of the run from whose state this one starts: `rewind` copies its log, into the mirror
                too, which shows a run of its own. Several runs may start from one.
        """
        if mode not in _PROGRAMS:
            raise ValueError(f"tracking.mode is {mode!r}: choose one of {', '.join(_PROGRAMS)}.")
        folder, resumed = Path(folder), None if resumed is None else Path(resumed)
        self._folder, self._mode = folder, mode
        self._path = folder / METRICS_FILE
        self._earlier = None if resumed is None else resumed / METRICS_FILE
        self._enabled = enabled
        self._mirror: Mirror | None = None
        self._last_step = 0
        self._to_mark: str | None = None  # why the mirror was lost, until a line says so
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._own = OwnFolder(folder)
        run_id = _read_run_id(folder) or secrets.token_hex(4)
        names = {"project": project, "group": group, "name": name, "tags": tags}
        try:
            self._mirror = _open_mirror(mode, folder, run_id, config or {}, names)
        except Exception as error:  # noqa: BLE001 - as in `_give`
            self._give_up(error)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write `values`, which must have "step", as one line; numbers that are not finite become null."""
        if "step" not in values:
            raise ValueError(f"the values {sorted(values)} lack 'step', which orders the lines: add it.")
        self._mirror_figures(self._write(values))

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table, such as the plan, as one line {"step", name: rows}; all rows have the same keys."""
        finite = self._write({"step": step, name: rows})[name]
        self._give(lambda mirror: mirror.log_table(step, name, finite))

    def log_outcome(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write the outcome as one line {"step", "outcome": [{"figure", "value"}, ...]}."""
        rows = [{"figure": figure, "value": value} for figure, value in figures.items()]
        known = {row["figure"]: row["value"] for row in self._write({"step": step, OUTCOME: rows})[OUTCOME]}
        self._give(lambda mirror: mirror.log_outcome(step, known))

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Write the path of a picture in the run's folder as one line {"step", name: path}."""
        self._write({"step": step, name: str(path.relative_to(self._folder))})
        self._give(lambda mirror: mirror.log_picture(step, name, path))

    def begin(self, plan: Sequence[Mapping[str, Any]]) -> None:
        """Write the plan if the log is empty."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            self.log_table(0, "plan", plan)

    def _write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, and return its values."""
        finite: dict[str, Any] = jsonable(values)
        self._last_step = finite["step"]
        if self._enabled:
            self._append([finite])
        return finite

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Append lines, and one that says why the mirror was lost, if that was not written yet."""
        if self._to_mark is not None:
            lines = [*lines, {"step": self._last_step, LOST: self._to_mark}]
        self._own.check()
        # Opened for each line, so that there is nothing to flush, lose or close.
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        except OSError as error:  # the error of a full disk has no path
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        self._to_mark = None

    def find_lost(self) -> str | None:
        """Return why a mirror was lost, in this session or an earlier one of the run; None if none was."""
        if self._to_mark is not None or not self._enabled or not self._path.exists():
            return self._to_mark
        lines = self._path.read_bytes().split(b"\n")
        marked = [line for line in lines if LOST.encode() in line and _is_until(line, sys.maxsize)]
        return str(json.loads(marked[-1]).get(LOST)) if marked else None

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, which a run that resumes there writes again, and a truncated last line.

        The outcome is always dropped, because the run will write another. A new run copies the lines of the run that it
        resumes; its mirror gets their figures.
        """
        logs = [path for path in (self._path, self._earlier) if path is not None and path.exists()]
        if not self._enabled or not logs:
            return
        kept = [line for line in logs[0].read_bytes().split(b"\n") if _is_until(line, step)]
        if logs[0] == self._earlier:
            kept = [line for line in kept if LOST not in json.loads(line)]
            for values in map(json.loads, kept):
                self._mirror_figures({key: value for key, value in values.items() if _is_figure(value)})
        write_flushed(self._path, b"".join(line + b"\n" for line in kept))

    def close(self, *, failed: bool = False) -> None:
        """End the mirror's run; nothing is mirrored after it."""
        self._give(lambda mirror: mirror.close(failed=failed))
        self._mirror = None
        if self._to_mark is not None:
            with suppress(OSError, ValueError):  # the run has reported these already
                self._append([])

    def _mirror_figures(self, values: Mapping[str, Any]) -> None:
        known = {_name_in_mirror(key): value for key, value in values.items() if key != "step" and value is not None}
        if known:
            self._give(lambda mirror: mirror.log(values["step"], known))

    def _give(self, give: Callable[[Mirror], None]) -> None:
        """Call `give` with the mirror, until its first failure."""
        if self._mirror is None:
            return
        try:
            give(self._mirror)
        except Exception as error:  # noqa: BLE001 - its process may be killed, its disk full, its account closed
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Continue without the mirror, after a warning with the reason."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(
            f"warning: {_PROGRAMS[self._mode]} failed ({reason}): the run continues with {self._path} alone; "
            "tracking=disabled turns it off.",
            file=sys.stderr,
            flush=True,
        )
        self._mirror, self._to_mark = None, f"{_PROGRAMS[self._mode]}: {reason}"
        if self._mode != "tensorboard":
            from gpipe.training.wandb_mirror import forget_service

            forget_service()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None and not issubclass(kind, Stopped))


def jsonable(value: Any) -> Any:
    """Return `value` with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _is_until(line: bytes, step: int) -> bool:
    """Return whether a line belongs to the steps up to `step`; a damaged line belongs to none."""
    try:
        values = json.loads(line)
        return int(values["step"]) <= step and OUTCOME not in values
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False


def _is_figure(value: Any) -> bool:
    """Return whether a line's value is no table, and no path of a picture, which is another folder's."""
    return not isinstance(value, str) and not (isinstance(value, list) and any(isinstance(row, dict) for row in value))


def _read_run_id(folder: Path) -> str | None:
    """Return the Weights & Biases id in a run's folder; None if there is none."""
    if not (folder / RUN_ID_FILE).exists():
        return None
    text = (folder / RUN_ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if not _RUN_ID.fullmatch(text):
        raise ValueError(f"{folder / RUN_ID_FILE} has {text!r}, expected a run's id: delete the file.")
    return text


def _name_in_mirror(key: str) -> str:
    """Return a figure's name in a mirror; an evaluation's figures have the name of their set already.

    Those of a set called "train" must not continue the curves of training.
    """
    if "/" in key or key == "epoch":
        return f"train_set{key.removeprefix('train')}" if key.startswith("train/") else key
    return f"train/{key}"


def _open_mirror(
    mode: str, folder: Path, run_id: str, config: Mapping[str, Any], names: Mapping[str, Any]
) -> Mirror | None:
    if mode == "disabled":
        return None
    if mode == "tensorboard":
        from gpipe.training.tensorboard_mirror import TensorBoardMirror

        return TensorBoardMirror(folder, config)
    from gpipe.training.wandb_mirror import WandbMirror

    write_flushed(folder / RUN_ID_FILE, run_id + "\n")
    return WandbMirror(folder, run_id, is_online=mode == "online", config=config, **names)


def check_mode(mode: str) -> str | None:
    """Return why this machine cannot track in a mode, with a remedy; None if it can."""
    if mode == "tensorboard" and find_spec("tensorboard") is None:
        return "the package tensorboard is not installed: install it, or set tracking=offline"
    if mode == "online":
        from gpipe.training.wandb_mirror import has_key

        if not has_key():
            remedy = "run `wandb login`, set WANDB_API_KEY, or set tracking=offline"
            return f"this machine has no Weights & Biases key: {remedy}"
    return None
