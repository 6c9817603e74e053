"""A run in TensorBoard."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter


class TensorBoardMirror:
    """Mirrors a run to TensorBoard's files, in the subfolder `tensorboard` of the run's folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder / "tensorboard", config
        self._writer: SummaryWriter | None = None

    def _at(self, step: int) -> SummaryWriter:
        """Return the writer, which hides what an earlier session wrote at this session's first step or later."""
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            self._write_text("config", self._config, step)
        return self._writer

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log figures of a step."""
        for key, value in values.items():
            if isinstance(value, int | float):
                self._at(step).add_scalar(key, value, step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a table, in Markdown."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._at(step).add_text(name, text, step)

    def log_picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture."""
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        self._at(step).add_image(name, pixels, step, dataformats="HWC")

    def log_outcome(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log the outcome as a text."""
        self._at(step + 1)  # a session that begins here repeats no step, so it must hide none
        self._write_text("outcome", figures, step)

    def close(self, *, failed: bool) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()

    def _write_text(self, name: str, values: Mapping[str, Any], step: int) -> None:
        text = "\n".join(f"    {line}" for line in json.dumps(values, indent=2).splitlines())  # Markdown's code
        self._at(step).add_text(name, text, step)
