"""The English lines that the languages of a corpus share, from the record of python -m experiments.english_lines.

Languages with the same English lines in every split are a single test, so they count as one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean

from gpipe.records import Record
from reproductions.study import Study
from reproductions.table import newest

ENGLISH_LINES = Study("english_lines")


def find_same(records: Sequence[Record], data: str) -> dict[str, str]:
    """Map each language of a data set that has the same English lines as others to the one that represents them."""
    record = _find(records, data)
    groups = [] if record is None else record.results["same"]
    return {language: group["languages"][0] for group in groups for language in group["languages"]}


def pool(values: Mapping[str, float], same: Mapping[str, str]) -> dict[str, float]:
    """Return values by language, with one mean for those that count as one."""
    found: dict[str, list[float]] = {}
    for language, value in values.items():
        found.setdefault(same.get(language, language), []).append(value)
    return {language: fmean(several) for language, several in found.items()}


def describe_number(languages: Collection[str], same: Mapping[str, str], noun: str = "") -> str:
    """Write how many languages there are, and as how many they count: "58 (counted as 45)", "1 language"."""
    number, counted = len(languages), len({same.get(language, language) for language in languages})
    named = f"{number} {noun}{'s' if number > 1 else ''}" if noun else f"{number}"
    return named if number == counted else f"{named} (counted as {counted})"


def describe_lines(records: Sequence[Record], data: str, split: str, languages: Iterable[str] | None = None) -> str:
    """Describe how many sentences of a split translate how many English lines; empty if unknown."""
    record = _find(records, data)
    if record is None:
        return ""
    lines = record.results["lines"][split]
    found = [lines[language] for language in (lines if languages is None else languages) if language in lines]
    return f"{sum(map(len, found)):,} translations of {len(set().union(*found)):,} English lines"


def _find(records: Sequence[Record], data: str) -> Record | None:
    found = (record for record in records if record.config.get("data", {}).get("name") == data)
    return newest(found, ENGLISH_LINES.experiment)


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
