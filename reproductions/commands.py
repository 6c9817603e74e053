"""The commands that repeat the trainings of a page and score their translations."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpipe.records import Record
from reproductions.table import markdown

_NO_RESULT = ("launch", "tracking", "reproduction")
"""Settings of a recorded command that change no result: where it runs, and where its metrics go.

They are dropped. The experiment then chooses the device, which a file of `launch` would override.
"""


@dataclass(frozen=True)
class Cell:
    """A training whose results are on a page, and the records of its translations' scores by beam."""

    name: str
    run: Record
    scored: Mapping[int, Record]


def cell_command(run: Record) -> str:
    """Return the command of a record without settings that change no result; folders of its machine are /path/to."""
    words = shlex.split(run.command)
    kept = [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] not in _NO_RESULT]
    return shlex.join(word.replace("<...>", "/path/to") for word in kept)


def scoring_command(run: Record, beam: int) -> str:
    """Return the command that scores the newest run of a training's experiment, at its lowest loss."""
    return shlex.join(["python", "bleu.py", f"runs/{run.config['name']}", "--beam", str(beam)])


def checkpoint_run(run: Record) -> str:
    """Return the name of the run's folder whose checkpoint a training started from; empty if there was none.

    The recorded settings have the folder that was found; the recorded command may only ask for the newest one.
    """
    return PurePosixPath(run.config.get("init_from") or "").name


def commands_table(cells: Iterable[Cell]) -> str:
    """Return a row per training, by name and seed: its command, followed by those that score its translations.

    If a training started from a checkpoint, the row has the folder of that run, because the command may name any.
    """
    found = sorted(cells, key=lambda cell: (cell.name, cell.run.seed, cell_command(cell.run)))
    starts = [checkpoint_run(cell.run) for cell in found]
    beams = sorted({beam for cell in found for beam in cell.scored})
    rows = [
        [
            cell.name,
            str(cell.run.seed),
            f"`{cell_command(cell.run)}`",
            *([start] if any(starts) else []),
            *(f"`{scoring_command(cell.run, beam)}`" if beam in cell.scored else "" for beam in beams),
        ]
        for cell, start in zip(found, starts, strict=True)
    ]
    header = ["training", "seed", "command", *(["started from the run in"] if any(starts) else [])]
    return markdown([*header, *(f"then, for beam {beam}" for beam in beams)], rows)
