"""The claims of the paper, one line each: its number beside what we measured, simulated and planned."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reproductions.table import markdown
from reproductions.verdict import CONFIDENCE, ONE_SEED, Interval

NOT_RUN = "not run"
NO_TEST = "no test: the paper gives no number"
COUNTED = "no test: bytes are counted, and have no interval"

_INTERVAL = re.compile(r"\[[+-][\d.]+%?, [+-][\d.]+%?\]")


@dataclass(frozen=True)
class Claim:
    """A row of the table of claims. A number that was only planned or simulated has no verdict.

    Attributes:
        text: The claim, and its place in the paper.
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


def claims_table(pages: Iterable[tuple[str, Sequence[Claim]]], links: str | None = None) -> str:
    """Return the rows of several pages; with `links`, the path to the folders, each claim links to its page."""
    rows = [
        [
            claim.text if links is None else f"[{claim.text}]({links}{page})",
            claim.paper,
            claim.measured,
            claim.simulated,
            claim.planned,
            claim.verdict,
        ]
        for page, claims in pages
        for claim in claims
    ]
    return markdown(["claim", "the paper", "measured here", "simulated", "planned", "verdict"], rows)


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


def format_verdicts(intervals: Iterable[tuple[str, Interval | None]], form: str | Mapping[str, str]) -> str:
    """Return the verdicts of several figures by their names, or "not run" without any.

    Several of one seed, which have no interval, are only counted.

    form: of the numbers, or by the names of the figures.
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
