"""Ways to do something that are measured in turns, so that what else the machine does disturbs all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TypeVar

from experiments.program import track

Name = TypeVar("Name")
Measured = TypeVar("Measured")


def take_turns(
    ways: Mapping[Name, Callable[[], Measured]], rounds: int, what: str | None = "rounds"
) -> dict[Name, list[Measured]]:
    """Measure each way once in each round; return what was measured, without a first round that warms up.

    Args:
        ways: what measures each way, by its name.
        rounds: how many count.
        what: is done, in the line of progress; None without one.
    """
    found: dict[Name, list[Measured]] = {name: [] for name in ways}
    turns = range(rounds + 1)
    for turn in turns if what is None else track(turns, what):
        for name, measure in ways.items():
            measured = measure()
            if turn > 0:
                found[name].append(measured)
    return found


def clock(run: Callable[[], object], times: int = 1, fence: Callable[[], object] = lambda: None) -> float:
    """Return the seconds that something takes, on average over some times; `fence` waits for what it has started."""
    fence()
    start = time.perf_counter()
    for _ in range(times):
        run()
    fence()
    return (time.perf_counter() - start) / times


def time_steps(
    steps: Mapping[Name, Callable[[], object]],
    rounds: int,
    what: str | None = None,
    times: int = 1,
    fence: Callable[[], object] = lambda: None,
) -> dict[Name, float]:
    """Return the median seconds of each step, which take turns; the arguments are those of the functions above."""
    seconds = take_turns({name: partial(clock, step, times, fence) for name, step in steps.items()}, rounds, what)
    return {name: median(found) for name, found in seconds.items()}


def median_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median of the paired ratios."""
    return median(one / other for one, other in zip(these, those, strict=True))
