"""Transfers with few labelled images: each way of starting at its own learning rate, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpipe.records import Record
from reproductions.claims import NOT_RUN, Claim, format_verdicts
from reproductions.commands import Cell
from reproductions.design import Arm, count_images
from reproductions.table import markdown, not_run
from reproductions.table4_imagenet_and_transfer.model_size import learning_rate, validation_top1
from reproductions.verdict import NO_DIFFERENCE, Interval, over_seeds

EXPERIMENT = "transfer_few_laptop"
STEPS = (50, 100, 200, 400)
STARTS = ("from scratch", "fine-tuned")


@dataclass(frozen=True)
class Start:
    """The runs of one set of images that start in one way.

    Attributes:
        by_rate: the runs by seed, for each learning rate that was tried, the lowest first.
    """

    by_rate: Mapping[float, Mapping[int, Record]]

    @property
    def rate(self) -> float:
        """The learning rate with the best mean over the seeds on the images that choose it."""
        return max(self.by_rate, key=lambda rate: fmean(map(validation_top1, self.by_rate[rate].values())))

    @property
    def runs(self) -> Mapping[int, Record]:
        """The runs at that rate, by seed."""
        return self.by_rate[self.rate]

    @property
    def searched(self) -> list[Record]:
        """The runs at the other rates."""
        return [run for rate, runs in self.by_rate.items() if rate != self.rate for run in runs.values()]

    @property
    def is_bracketed(self) -> bool:
        """Whether a lower and a higher rate were tried, too."""
        return min(self.by_rate) < self.rate < max(self.by_rate)

    def top1(self, step: int) -> dict[int, float]:
        """Return the accuracy on the test images after so many steps, by seed; without runs evaluated then."""
        found = {seed: _top1_after(run, step) for seed, run in self.runs.items()}
        return {seed: top1 for seed, top1 in found.items() if top1 is not None}

    def find_rise(self, first: int, last: int) -> Interval | None:
        """Return by how much the accuracy rises between two steps; None without both."""
        before, after = self.top1(first), self.top1(last)
        return over_seeds([after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())])


def transfer_steps(records: Sequence[Record]) -> str:
    """Return the accuracy by the number of steps, of each way of starting, and what fine-tuning gains at each.

    Both start with the rate that the validation images choose. A start has converged where the accuracies of the last
    two numbers of steps do not differ by the pages' test.
    """
    found = read_starts(records)
    if not found:
        return not_run(f"train.py -m +experiment={EXPERIMENT}")
    rows = [
        row
        for (data, limit), starts in found.items()
        for row in (*(_describe(data, limit, *start) for start in starts.items()), _compare(data, limit, starts))
        if row is not None
    ]
    header = ["data set", "images", "start", "learning rate, of those tried", *(f"{step} steps" for step in STEPS)]
    return markdown([*header, "converged, or pre-training helps"], rows)


def read_starts(records: Sequence[Record]) -> dict[tuple[str, int], dict[str, Start]]:
    """Return the ways of starting, for each set and number of images. Of two equal runs the later one counts."""
    runs: dict[tuple[str, int], dict[str, dict[float, dict[int, Record]]]] = {}
    for run in records:
        if run.experiment == EXPERIMENT and "evaluation" in run.results:
            data = run.config["data"]
            starts = runs.setdefault((data["name"], data["max_images"]), {name: {} for name in STARTS})
            starts[STARTS[run.config.get("init_from") is not None]].setdefault(learning_rate(run), {})[run.seed] = run
    return {
        images: {name: Start(dict(sorted(rates.items()))) for name, rates in starts.items() if rates}
        for images, starts in sorted(runs.items())
    }


def find_gain(starts: Mapping[str, Start], step: int) -> Interval | None:
    """Return how much more accurate fine-tuned models are after so many steps, seed by seed; None without pairs."""
    if len(starts) < len(STARTS):
        return None
    scratch, tuned = (starts[name].top1(step) for name in STARTS)
    return over_seeds([tuned[seed] - scratch[seed] for seed in sorted(scratch.keys() & tuned.keys())])


def few_claims(records: Sequence[Record]) -> list[Claim]:
    """Return whether pre-training helps with few labelled images, after all steps."""
    gains = {
        f"{data}, {limit} images": find_gain(starts, STEPS[-1])
        for (data, limit), starts in read_starts(records).items()
    }
    return [claim_help("where labelled images are few", gains)]


def claim_help(what: str, gains: Mapping[str, Interval | None]) -> Claim:
    """Return the claim that pre-training helps, with the gains of accuracy by what was trained."""
    points = [100 * gain.mean for gain in gains.values() if gain is not None]
    return Claim(
        f"pre-training helps {what}, at laptop scale",
        "not compared",
        f"{min(points):+.1f} to {max(points):+.1f} points of top-1" if points else NOT_RUN,
        verdict=format_verdicts(gains.items(), ".1%"),
    )


def few_cells(records: Sequence[Record]) -> list[Cell]:
    """Return a cell per training, those that chose a learning rate too."""
    return [
        Cell(f"{data}, {limit} images, {name}", run, {})
        for (data, limit), starts in read_starts(records).items()
        for name, start in starts.items()
        for run in (*start.runs.values(), *start.searched)
    ]


def few_arms(records: Sequence[Record]) -> list[Arm]:
    """Return what was trained alike: each way of starting, on each set of images."""
    question = "does pre-training help where labelled images are few?"
    arms = []
    for (data, limit), starts in read_starts(records).items():
        for name, start in starts.items():
            runs = list(start.runs.values())
            tested = f"{count_images(runs):,} images of {data}"
            arms.append(
                Arm(question, f"{data}, {limit} images, {name}", EXPERIMENT, runs, start.searched, test_items=tested)
            )
    return arms or [Arm(question, "50, 100 and 500 images", EXPERIMENT, ())]


def _describe(data: str, limit: int, name: str, start: Start) -> list[str]:
    tried = ", ".join(f"{rate:g}" for rate in start.by_rate)
    edge = "" if start.is_bracketed else ": at the end of the search"
    top1 = [f"{fmean(found.values()):.1%}" if (found := start.top1(step)) else "" for step in STEPS]
    rise = start.find_rise(*STEPS[-2:])
    if rise is None:
        converged = "not run"
    else:
        converged = f"{'yes' if rise.verdict == NO_DIFFERENCE else 'no'} [{rise.low:+.1%}, {rise.high:+.1%}]"
    return [data, str(limit), name, f"{start.rate:g} of {tried}{edge}", *top1, converged]


def _compare(data: str, limit: int, starts: Mapping[str, Start]) -> list[str] | None:
    gains = [find_gain(starts, step) for step in STEPS]
    if gains[-1] is None:
        return None
    points = ["" if gain is None else f"{100 * gain.mean:+.1f}" for gain in gains]
    return [data, str(limit), "gain", "", *points, gains[-1].describe(".1%")]


def _top1_after(run: Record, step: int) -> float | None:
    return next(
        (point["test/top1"] for point in run.results["curve"] if point["step"] == step and "test/top1" in point), None
    )
