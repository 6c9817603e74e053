"""How a run came to its outcome: the figures of each evaluation, and the training's in between."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any


def read_curve(metrics: Path) -> list[dict[str, Any]]:
    """Return a row an evaluation, from the log of a run.

    A row has the step, the epoch, the evaluation's figures, such as "test/top1", and as "loss" and "top1" the means
    over the training steps since the evaluation before. Figures that are not finite, null in the log, are left out.
    """
    rows: list[dict[str, Any]] = []
    since: dict[str, list[float]] = {"loss": [], "top1": []}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        evaluated = {key: value for key, value in values.items() if "/" in key and value is not None}
        if evaluated:
            means = {key: fmean(found) for key, found in since.items() if found}
            rows.append({"step": values["step"], "epoch": values["epoch"], **means, **evaluated})
            since = {key: [] for key in since}
        for key, found in since.items():
            if isinstance(values.get(key), float):
                found.append(values[key])
    return rows
