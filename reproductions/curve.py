"""The curves of a run: the metrics of each evaluation, and those of the training in between."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any


def read_curve(metrics: Path) -> list[dict[str, Any]]:
    """Return one row per evaluation, from the log of a run.

    A row has the step, the epoch, and the evaluation's figures, such as "test/top1". "loss" and "top1" are the means
    over the training steps since the previous evaluation. Left out are figures that are not finite (null in the log),
    and those of parts of an evaluation set, such as "valid/sw/loss": a record has the last of these anyway.
    """
    rows: list[dict[str, Any]] = []
    since: dict[str, list[float]] = {"loss": [], "top1": []}
    for values in _read_lines(metrics):
        evaluated = {key: value for key, value in values.items() if "/" in key and value is not None}
        if evaluated:
            means = {key: fmean(found) for key, found in since.items() if found}
            whole = {key: value for key, value in evaluated.items() if key.count("/") == 1}
            rows.append({"step": values["step"], "epoch": values["epoch"], **means, **whole})
            since = {key: [] for key in since}
        for key, found in since.items():
            if isinstance(values.get(key), float):
                found.append(values[key])
    return rows


def read_training(metrics: Path, num_rows: int = 30, num_steps: int = 10) -> list[dict[str, Any]]:
    """Return at most `num_rows` rows of training steps from the log of a run; only the last may be below `num_steps`.

    A row has its last step, the means of "loss", "nll", "top1" and "clipped" over its steps, and the largest
    "gradient_norm" before clipping. Figures that the log lacks, or that are not finite, are left out.
    """
    steps = [values for values in _read_lines(metrics) if "learning_rate" in values]
    width = max(num_steps, math.ceil(len(steps) / num_rows))
    rows = []
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        row = {"step": part[-1]["step"]}
        for key, of in (("loss", fmean), ("nll", fmean), ("top1", fmean), ("clipped", fmean), ("gradient_norm", max)):
            found = [values[key] for values in part if values.get(key) is not None]
            row |= {key: of(found)} if found else {}
        rows.append(row)
    return rows


def _read_lines(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a log since the last start: a failed run may have started again in the same folder."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    starts = [place for place, values in enumerate(lines) if values["step"] == 1 and "learning_rate" in values]
    return lines[starts[-1] :] if starts else lines
