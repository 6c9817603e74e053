"""The table of the English lines that languages share, from the record of python -m experiments.english_lines."""

from gpipe.records import Record
from reproductions.study import Study

ENGLISH_LINES = Study("english_lines")


@ENGLISH_LINES.table
def english_lines(record: Record) -> str:
    """Name the languages that count as one."""
    groups = [
        f"{', '.join(group['languages'])}: these {len(group['languages'])} languages have the same English lines, "
        + ", ".join(f"{number} ({split})" for split, number in group["num_lines"].items())
        + ". They count as one.\n"
        for group in record.results["same"]
    ]
    return "\n".join(groups) or "No two languages have the same English lines.\n"
