"""The log of a run: metrics.jsonl, which is the record, and Weights & Biases, its mirror."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import wandb

METRICS_FILE = "metrics.jsonl"
_MODES = ("offline", "online", "disabled")


class Tracker:
    """Append one JSON object a line to `folder/metrics.jsonl`, at once, and mirror it to Weights & Biases.

    Used with `with`, so that a run which fails is closed as failed. Where `enabled` is False (on all processes but one)
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
    ) -> None:
        """Begin in `folder`, or go on there; `mode` is offline (no account needed), online or disabled.

        `group` is the experiment, `name` the run, `config` the composed configuration as a plain dict.
        """
        if mode not in _MODES:
            raise ValueError(f"The tracking mode is {mode!r}: choose one of {', '.join(_MODES)}.")
        self._path = folder / METRICS_FILE
        self._enabled = enabled
        self._run: wandb.Run | None = None
        if not enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if mode == "disabled":
            return
        # Without these settings arguments, console output and source files land in its folder.
        settings = wandb.Settings(x_disable_meta=True, save_code=False, console="off", silent=True)
        self._run = wandb.init(
            mode="online" if mode == "online" else "offline",
            dir=str(folder),
            project=project,
            group=group,
            name=name,
            config=dict(config or {}),
            settings=settings,
        )

    def log(self, values: Mapping[str, Any]) -> None:
        """Write `values` as one line; they must have "step", and numbers that are not finite become null."""
        if not self._enabled:
            return
        if "step" not in values:
            raise ValueError(f"The values {sorted(values)} lack 'step', by which the lines are ordered: add it.")
        finite = jsonable(values)
        # Opened for each line: there is nothing to flush, to lose, or to close.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")
        if self._run is not None:
            self._run.log({key: value for key, value in finite.items() if value is not None}, step=values["step"])

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, which a run that resumes there writes again, and a last line cut short."""
        if not self._enabled or not self._path.exists():
            return
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _is_until(line, step)]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        partial.replace(self._path)

    def close(self, *, failed: bool = False) -> None:
        """End the W&B run; nothing is mirrored after that."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def jsonable(value: Any) -> Any:
    """Return `value` with NaN and infinities as None, which JSON has no numbers for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _is_until(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False
