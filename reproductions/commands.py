"""The commands that run the cells of a page again: a training each, and what scores its translations."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpipe.records import Record
from reproductions.table import markdown

_NO_RESULT = ("launch", "tracking", "reproduction")
"""Settings of a recorded command that change no result: where it runs, and where its figures go.

Without them, the experiment says on which device: a file of `launch` would replace that.
"""


@dataclass(frozen=True)
class Cell:
    """A training that cells of a page are made of, and the records of its translations' scores by beam."""

    name: str
    run: Record
    scored: Mapping[int, Record]


def cell_command(run: Record) -> str:
    """Return the command of a record without what changes no result; a folder of that machine is /path/to."""
    words = shlex.split(run.command)
    kept = [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] not in _NO_RESULT]
    return shlex.join(word.replace("<...>", "/path/to") for word in kept)


def scoring_command(run: Record, beam: int) -> str:
    """Return the command that scores the newest run of a training's experiment, at its lowest loss."""
    return shlex.join(["python", "bleu.py", f"runs/{run.config['name']}", "--beam", str(beam)])


def checkpoint_run(run: Record) -> str:
    """Return the name of the run's folder whose checkpoint a training began with; empty where it began with none.

    The recorded settings have the folder that was found; the recorded command may only say to take the newest one.
    """
    return PurePosixPath(run.config.get("init_from") or "").name


def commands_table(cells: Iterable[Cell]) -> str:
    """Return a row per training, by name and seed: its command, and after it those that score its translations.

    Where a training began with another one's checkpoint, there is the folder of that run: the command may name any.
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
