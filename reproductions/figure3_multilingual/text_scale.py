"""The table of a corpus's memory and time until the first mini-batch, from python -m experiments.text_scale."""

from typing import Any

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import markdown

BUILD, START, RESUME = "build", "start", "resume"
_MOST = 1.2  # times the least of all sizes
_NAMES = ("seconds", "seconds_of_work", "private_bytes", "seconds_from_disk")
_FIGURES = [*((what, name) for what in (START, RESUME) for name in _NAMES), (RESUME, "resident_bytes")]
_HEADER = [
    "pairs",
    "cache, MB",
    "tokenising, s",
    "its memory, MB",
    *(
        f"{place}: {figure}"
        for place in ("epoch 0", "middle of epoch 1")
        for figure in ("s", "processor, s", "MB", "from the disk, s")
    ),
    "the same with mapped pages, MB",
]
TEXT_SCALE = Study("text_scale")


@TEXT_SCALE.table
def text_scale(record: Record) -> str:
    """Return a row per size of the corpus, and how much each figure of a ready cache changes with the size."""
    rows = record.results["rows"]
    ratios = [max(values) / min(values) for values in ([row[what][name] for row in rows] for what, name in _FIGURES)]
    verdicts = [f"{ratio:.2f}, {'flat' if ratio <= _MOST else 'not flat'}" for ratio in ratios]
    last = [f"largest / smallest figure (flat: at most {_MOST})", "", "", "", *verdicts]
    return markdown(_HEADER, [*map(_row, rows), last])


def _row(row: dict[str, Any]) -> list[str]:
    figures = [
        _megabytes(row[what][name]) if name.endswith("bytes") else f"{row[what][name]:.2f}" for what, name in _FIGURES
    ]
    build = row[BUILD]
    return [
        f"{row['num_pairs']:,}",
        _megabytes(row["cache_bytes"]),
        f"{build['seconds']:.0f}",
        _megabytes(build["private_bytes"]),
        *figures,
    ]


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f}"
