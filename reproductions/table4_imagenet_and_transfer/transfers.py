"""Transfers at laptop scale, of whole sets and of few labelled images: each start at its own rate, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Self

from gpipe.records import Record
from reproductions.claims import NOT_RUN, Claim, format_verdicts
from reproductions.commands import Cell, checkpoint_run
from reproductions.design import Arm, count_images
from reproductions.table import markdown, not_run
from reproductions.table4_imagenet_and_transfer.model_size import learning_rate, validation_top1
from reproductions.verdict import Interval, over_seeds

WHOLE, FEW = "transfer_table_laptop", "transfer_few_laptop"
SHARES = {"an eighth": 8, "a quarter": 4, "half": 2, "all": 1}
"""The parts of a run after which it was evaluated: what to divide its number of steps by."""
STARTS = ("from scratch", "fine-tuned")


@dataclass(frozen=True)
class Images:
    """What was learned, and for how long.

    Attributes:
        data: the name of the set.
        limit: how many of its training images; None for all.
        steps: the most steps of a run.
    """

    data: str
    limit: int | None
    steps: int

    @classmethod
    def of(cls, run: Record) -> Self:
        """Return what a run learned."""
        return cls(run.config["data"]["name"], run.config["data"].get("max_images"), run.config["trainer"]["max_steps"])

    def __str__(self) -> str:
        return f"{self.data}, {'all' if self.limit is None else self.limit} images"

    @property
    def order(self) -> tuple[str, float, int]:
        """By what tables are sorted: whole sets come last."""
        return self.data, inf if self.limit is None else self.limit, self.steps

    def steps_of(self, share: str) -> int:
        """Return the number of steps of a part of a run."""
        return self.steps // SHARES[share]


@dataclass(frozen=True)
class Start:
    """The runs of one set of images that start in one way.

    Attributes:
        by_rate: the runs by seed, for each learning rate that was tried, the lowest first.
    """

    by_rate: Mapping[float, Mapping[int, Record]]

    @property
    def rate(self) -> float:
        """The learning rate with the best mean on the images that choose it, over the seeds that all rates have."""
        shared = set.intersection(*map(set, self.by_rate.values()))
        return max(
            self.by_rate,
            key=lambda rate: fmean(
                validation_top1(run) for seed, run in self.by_rate[rate].items() if seed in shared or not shared
            ),
        )

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
        """Return the accuracy on the test images after a number of steps, by seed, of the runs evaluated then."""
        found = {seed: _top1_after(run, step) for seed, run in self.runs.items()}
        return {seed: top1 for seed, top1 in found.items() if top1 is not None}

    def find_rise(self, first: int, last: int) -> Interval | None:
        """Return by how much the accuracy rises between two steps; None without both."""
        before, after = self.top1(first), self.top1(last)
        return over_seeds([after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())])


def transfer_steps(records: Sequence[Record]) -> str:
    """Return the accuracy by the number of steps, of each way of starting, and what fine-tuning gains at each.

    Both start with the rate that the validation images choose. The last column of a start is how far its accuracy rises
    from half of the steps to all.
    """
    rows = [
        row
        for images, starts in read_starts(records).items()
        for row in (*(_describe(images, *start) for start in starts.items()), _compare(images, starts))
        if row is not None
    ]
    if not rows:
        return not_run(f"train.py -m +experiment={WHOLE}")
    header = ["data set", "images", "steps", "start", "learning rate, of those tried", *SHARES]
    return markdown([*header, "rises from half to all, or pre-training helps"], rows)


def transfer_checkpoints(records: Sequence[Record]) -> str:
    """Return what each seed gains in test images, and which pre-training each fine-tuned run began with, by rate.

    All seeds have the same test images. Their interval does not draw these, nor the pre-trainings.
    """
    compared = {images: starts for images, starts in read_starts(records).items() if len(starts) == len(STARTS)}
    tuned = {images: starts[STARTS[1]] for images, starts in compared.items()}
    names = sorted({checkpoint_run(run) for start in tuned.values() for run in (*start.runs.values(), *start.searched)})
    marks = {name: f"P{number}" for number, name in enumerate(names, start=1)}
    rows = []
    for images, starts in compared.items():
        num_images = count_images([run for start in starts.values() for run in start.runs.values()])
        gains = list_gains(starts, images.steps)
        by_rate = (
            f"{rate:g}: {' '.join(marks[checkpoint_run(run)] for _, run in sorted(runs.items()))}"
            for rate, runs in tuned[images].by_rate.items()
        )
        in_images = ", ".join(f"{round(gain * num_images):+}" for gain in gains.values())
        rows.append([*_name(images), in_images, f"{num_images:,}", f"{tuned[images].rate:g}", "; ".join(by_rate)])
    if not rows:
        return not_run(f"train.py -m +experiment={WHOLE}")
    header = ["data set", "images", "steps", "gain of each seed, in test images", "of how many", "rate compared"]
    known = markdown(["pre-training", "folder of the run"], [[mark, name] for name, mark in marks.items()])
    return "\n".join((markdown([*header, "pre-training of each seed, by learning rate"], rows), known))


def read_starts(records: Sequence[Record]) -> dict[Images, dict[str, Start]]:
    """Return the ways of starting, for each set and number of images. Of two equal runs the later one counts."""
    runs: dict[Images, dict[str, dict[float, dict[int, Record]]]] = {}
    for run in transfers(records):
        starts = runs.setdefault(Images.of(run), {name: {} for name in STARTS})
        starts[STARTS[run.config.get("init_from") is not None]].setdefault(learning_rate(run), {})[run.seed] = run
    return {
        images: {name: Start(dict(sorted(rates.items()))) for name, rates in runs[images].items() if rates}
        for images in sorted(runs, key=lambda images: images.order)
    }


def transfers(records: Sequence[Record]) -> list[Record]:
    """Return the records of transfers at laptop scale with a fixed number of steps, and images to choose a rate."""
    return [
        run
        for run in records
        if run.experiment in (WHOLE, FEW)
        and "valid" in run.results.get("evaluation", {})
        and run.config["trainer"]["max_steps"] is not None
    ]


def find_gain(starts: Mapping[str, Start], step: int) -> Interval | None:
    """Return how much more accurate fine-tuned models are after a number of steps, by seed; None without pairs."""
    return None if len(starts) < len(STARTS) else over_seeds(list(list_gains(starts, step).values()))


def list_gains(starts: Mapping[str, Start], step: int) -> dict[int, float]:
    """Return how much more accurate the fine-tuned model of each seed is after a number of steps."""
    scratch, tuned = (starts[name].top1(step) for name in STARTS)
    return {seed: tuned[seed] - scratch[seed] for seed in sorted(scratch.keys() & tuned.keys())}


def transfer_claims(records: Sequence[Record]) -> list[Claim]:
    """Return whether pre-training helps with all images of another set, and with few, after all steps."""
    gains = {images: find_gain(starts, images.steps) for images, starts in read_starts(records).items()}
    return [
        _claim_help(what, {str(images): gain for images, gain in gains.items() if (images.limit is None) == is_whole})
        for what, is_whole in (("on another data set", True), ("with few labelled images", False))
    ]


def transfer_cells(records: Sequence[Record]) -> list[Cell]:
    """Return a cell per training, those that chose a learning rate too."""
    return [
        Cell(f"{images}, {name}", run, {})
        for images, starts in read_starts(records).items()
        for name, start in starts.items()
        for run in (*start.runs.values(), *start.searched)
    ]


def transfer_arms(records: Sequence[Record]) -> list[Arm]:
    """Return what was trained alike: each way of starting, on each set of images."""
    arms: dict[str, list[Arm]] = {WHOLE: [], FEW: []}
    for images, starts in read_starts(records).items():
        for name, start in starts.items():
            runs = list(start.runs.values())
            experiment, tested = runs[0].experiment, f"{count_images(runs):,} images of {images.data}"
            trained = f"{images}, {name}"
            arms[experiment].append(
                Arm(_QUESTIONS[experiment], trained, experiment, runs, start.searched, test_items=tested)
            )
    return [
        arm
        for experiment, found in arms.items()
        for arm in found or [Arm(_QUESTIONS[experiment], "digits", experiment, ())]
    ]


_QUESTIONS = {
    WHOLE: "does pre-training help on another data set?",
    FEW: "does pre-training help with few labelled images?",
}


def _claim_help(what: str, gains: Mapping[str, Interval | None]) -> Claim:
    points = sorted(100 * gain.mean for gain in gains.values() if gain is not None)
    ends = dict.fromkeys(f"{value:+z.1f}" for value in (*points[:1], *points[-1:]))  # one, if they are alike
    return Claim(
        f"pre-training helps {what}, at laptop scale",
        "not compared",
        f"{' to '.join(ends)} points of top-1" if points else NOT_RUN,
        verdict=format_verdicts(gains.items(), ".1%"),
        scope="intervals over seeds, not over test images or pre-trainings",
    )


def _describe(images: Images, name: str, start: Start) -> list[str]:
    tried = ", ".join(f"{rate:g}" for rate in start.by_rate)
    edge = "" if start.is_bracketed else ": at the end of the search"
    top1 = [f"{fmean(found.values()):.1%}" if (found := start.top1(images.steps_of(share))) else "" for share in SHARES]
    rise = start.find_rise(images.steps_of("half"), images.steps)
    risen = "not run" if rise is None else rise.describe(".1%", f"{rise.mean:+z.1%}")
    return [*_name(images), name, f"{start.rate:g} of {tried}{edge}", *top1, risen]


def _compare(images: Images, starts: Mapping[str, Start]) -> list[str] | None:
    gains = [find_gain(starts, images.steps_of(share)) for share in SHARES]
    if gains[-1] is None:
        return None
    points = ["" if gain is None else f"{100 * gain.mean:+z.1f}" for gain in gains]
    return [*_name(images), "gain", "", *points, gains[-1].describe(".1%")]


def _name(images: Images) -> list[str]:
    return [images.data, "all" if images.limit is None else str(images.limit), str(images.steps)]


def _top1_after(run: Record, step: int) -> float | None:
    return next(
        (point["test/top1"] for point in run.results["curve"] if point["step"] == step and "test/top1" in point), None
    )
