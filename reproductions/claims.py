"""The claims of the paper, one line each: its number beside what we measured, simulated and planned."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from reproductions.table import markdown, write_table
from reproductions.verdict import CONFIDENCE, ONE_SEED, Interval

NOT_RUN = "not run"
NO_TEST = "no test: the paper gives no number"
COUNTED = "no test: counted bytes have no interval"

_INTERVAL = re.compile(r"\[[+-][\d.]+%?, [+-][\d.]+%?\]")
_DECIDED = re.compile(rf"([a-z ]+) {_INTERVAL.pattern}")


@dataclass(frozen=True)
class Claim:
    """A row of the table of claims. A number that was only planned or simulated has no verdict.

    Attributes:
        text: The claim, and its place in the paper.
        scope: What was compared, and what its intervals are over.
        paper: The paper's number.
        measured: Ours, measured.
        simulated: Ours, simulated.
        planned: Ours, planned.
        verdict: Whether the measurement agrees.
    """

    text: str
    paper: str
    measured: str = NOT_RUN
    simulated: str = ""
    planned: str = ""
    verdict: str = NOT_RUN
    scope: str = ""


def claims_table(pages: Iterable[tuple[str, Sequence[Claim]]], links: str | None = None) -> str:
    """Return the rows of several pages; with `links`, the path to the folders, each claim links to its page."""
    columns: dict[str, Callable[[tuple[str, Claim]], str]] = {
        "claim": lambda row: row[1].text if links is None else f"[{row[1].text}]({links}{row[0]})",
        "scope": lambda row: row[1].scope,
        "the paper": lambda row: row[1].paper,
        "measured here": lambda row: row[1].measured,
        "simulated": lambda row: row[1].simulated,
        "planned": lambda row: row[1].planned,
        "verdict": lambda row: row[1].verdict,
    }
    return write_table(((page, claim) for page, claims in pages for claim in claims), columns)


def verdicts_table(pages: Iterable[tuple[str, Sequence[Claim]]], links: str) -> str:
    """Return a short row for each claim, without intervals and scopes; the numbers are of its first, widest scope."""
    rows = []
    for page, claims in pages:
        for text, found in itertools.groupby(claims, lambda claim: claim.text):
            first, *others = found
            verdict = _shorten(claim.verdict for claim in (first, *others))
            rows.append([f"[{text}]({links}{page})", first.paper, first.measured, first.planned, verdict])
    return markdown(["claim", "the paper", "measured here", "planned", "verdict"], rows)


def _shorten(verdicts: Iterable[str]) -> str:
    """Count the verdicts that follow from an interval; without any, there is only the first text."""
    texts = list(verdicts)
    counts = Counter(word.strip() for text in texts for word in _DECIDED.findall(text))
    if len(counts) < 2:
        return next(iter(counts), texts[0])
    return ", ".join(f"{word} {number} of {counts.total()}" for word, number in counts.most_common())


def count_intervals(claims: Iterable[Claim]) -> int:
    """Return how many intervals the verdicts of some claims state."""
    return sum(len(_INTERVAL.findall(claim.verdict)) for claim in claims)


def describe_chance(claims: Iterable[Claim]) -> str:
    """Say how many intervals of some claims are expected to exclude zero by chance."""
    number = count_intervals(claims)
    return (
        f"One time in twenty is for each interval by itself. The table of claims has {number} intervals: if there were "
        f"no effect anywhere, up to {number * (1 - CONFIDENCE):.1f} of them would be expected to exclude zero.\n"
    )


def format_gains(intervals: Mapping[str, Interval | None], forms: Mapping[str, str]) -> str:
    """Return the mean gains of several figures by their names; forms: the formats of the numbers."""
    return "; ".join(
        f"{name} {interval.mean:+z{forms[name]}}" for name, interval in intervals.items() if interval is not None
    )


def format_verdicts(intervals: Iterable[tuple[str, Interval | None]], form: str | Mapping[str, str]) -> str:
    """Return the verdicts of several figures by their names, or "not run" if there are none.

    Figures with one seed have no interval; several of them are only counted.

    form: the format of the numbers, or the formats by figure.
    """
    found = [
        (name, interval.describe(form if isinstance(form, str) else form[name]))
        for name, interval in intervals
        if interval is not None
    ]
    single = [name for name, text in found if text == ONE_SEED]
    if len(single) > 1:
        decided = [(name, text) for name, text in found if text != ONE_SEED]
        found = [*decided, (f"{len(single)} others" if decided else f"all {len(single)}", ONE_SEED)]
    return "; ".join(f"{name}: {text}" if name else text for name, text in found) or NOT_RUN
