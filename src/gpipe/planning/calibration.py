"""The measured seconds of a model's layers, and of the engine's tasks, for later plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpipe.durable_files import write_flushed
from gpipe.planning.accelerator import LayerSeconds


@dataclass(frozen=True)
class Calibration:
    """The measured seconds of a model's layers and loss on a device, and those planned for the same micro-batches.

    Attributes:
        origin: what was measured, and where: the model, the device, the version of torch, the type of data. Plans of
            the same origin use the calibration.
        microbatch_size: examples of the micro-batches that were measured.
        measured: seconds of each layer and the loss.
        planned: likewise, by the roofline.
        task_seconds: what the engine adds to a task.
    """

    origin: dict[str, Any]
    microbatch_size: int
    measured: list[LayerSeconds]
    planned: list[LayerSeconds]
    task_seconds: float

    def correct(self, planned: Sequence[LayerSeconds]) -> list[LayerSeconds]:
        """Return planned seconds, for micro-batches of any size, times the ratio of measured to planned ones.

        Raises:
            ValueError: the number of layers differs.
        """
        rows = zip(planned, self.measured, self.planned, strict=True)
        return [_correct(now, measured, before) for now, measured, before in rows]

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_flushed(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read what `write` wrote.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            place = ".".join(map(str, fault["loc"])) or "the file"
            raise ValueError(
                f"{path} is not a calibration ({place}: {fault['msg']}): remove it, or run plan.py calibrate=true."
            ) from None


def _correct(now: LayerSeconds, measured: LayerSeconds, before: LayerSeconds) -> LayerSeconds:
    passes = (
        known if planned == 0 else value * known / planned
        for value, known, planned in zip(now[:4], measured[:4], before[:4], strict=True)
    )
    forward, recompute, backward, weights = passes
    if before.weights == 0 and now.backward > 0:  # smaller products do not wait: see pipeline/layers/split_backward.py
        weights = backward * now.weights / now.backward
    share = measured.splitting / measured.backward if measured.backward > 0 else 0.0
    return LayerSeconds(forward, recompute, backward, weights, backward * share)
