"""Accuracy against size, as the paper's figure 1(a) shows it: small AmoebaNets, and what they are transferred to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2
from statistics import fmean, stdev

import numpy as np

from gpipe.records import Record
from reproductions.claims import NOT_RUN, Claim, format_verdicts
from reproductions.commands import Cell
from reproductions.design import Arm, count_images
from reproductions.table import markdown, not_run
from reproductions.verdict import Interval, over_seeds

PROGRAM = "python -m experiments.model_size"
TRAINED = {"photographs": "model_size_laptop", "100 digits": "transfer_size_laptop"}
"""What the models are trained on, and by which experiment; the second begins with the weights of the first."""


@dataclass(frozen=True)
class Tuned:
    """The runs of one size on one set of images.

    Attributes:
        parameters: of the model.
        runs: by seed, at the learning rate that the validation images chose.
        searched: the runs at other rates.
    """

    parameters: int
    runs: Mapping[int, Record]
    searched: Sequence[Record]

    @property
    def rate(self) -> float:
        """The learning rate that was chosen."""
        return float(learning_rate(next(iter(self.runs.values()))))

    @cached_property
    def top1(self) -> dict[int, float]:
        """The accuracy on the test images, by seed."""
        return {seed: _top1(run, "test") for seed, run in self.runs.items()}


def learning_rate(run: Record) -> float:
    """Return the learning rate of a run."""
    return float(run.config["optimizer"]["learning_rate"])


def validation_top1(run: Record) -> float:
    """Return a run's accuracy on the images that choose the learning rate."""
    return _top1(run, "valid")


def tuned_sizes(records: Sequence[Record], experiment: str) -> dict[int, Tuned]:
    """Return the runs of each size by its number of filters, the smallest first.

    The rate is the one that is best for the first seed of a size. Of two equal runs the later one counts.
    """
    found: dict[int, dict[tuple[int, float], Record]] = {}
    for run in records:
        if run.experiment == experiment and "evaluation" in run.results:
            found.setdefault(run.config["model"]["num_filters"], {})[run.seed, learning_rate(run)] = run
    sizes = {}
    for num_filters, runs in sorted(found.items()):
        first = min(seed for seed, _ in runs)
        tried = [run for (seed, _), run in runs.items() if seed == first]
        best = learning_rate(max(tried, key=validation_top1))
        sizes[num_filters] = Tuned(
            tried[0].results["parameters"],
            {seed: run for (seed, rate), run in sorted(runs.items()) if rate == best},
            [run for (_, rate), run in runs.items() if rate != best],
        )
    return sizes


def gain_per_doubling(sizes: Mapping[int, Tuned]) -> Interval | None:
    """Return what each doubling of the parameters adds to the accuracy: the slope of a line for each seed.

    A line is that of least squares over the logarithm of the number of parameters. None without a seed that all sizes
    have, and without two sizes.
    """
    if len(sizes) < 2:
        return None
    places = [log2(size.parameters) for size in sizes.values()]
    seeds = sorted(set.intersection(*(set(size.top1) for size in sizes.values())))
    return over_seeds([float(np.polyfit(places, [size.top1[seed] for size in sizes.values()], 1)[0]) for seed in seeds])


def model_size(records: Sequence[Record]) -> str:
    """Return the accuracy of each size on the photographs and after the transfer, then what a doubling adds to it."""
    found = {images: tuned_sizes(records, experiment) for images, experiment in TRAINED.items()}
    if not any(found.values()):
        return not_run(PROGRAM)
    rows = []
    for num_filters in sorted({one for sizes in found.values() for one in sizes}):
        tuned = [sizes.get(num_filters) for sizes in found.values()]
        parameters = next(size.parameters for size in tuned if size is not None)
        columns = [column for size in tuned for column in _describe(size)]
        rows.append([f"AmoebaNet-B (3,{num_filters})", f"{parameters:,}", *columns])
    header = [column for images in TRAINED for column in (f"{images}: learning rate", "top-1", "deviation", "runs")]
    slopes = []
    for images, sizes in found.items():
        slope = gain_per_doubling(sizes)
        if slope is not None:
            slopes.append([images, f"{100 * slope.mean:+z.2f} points", slope.describe(".2%")])
    lines = markdown(["each doubling of the parameters adds", "top-1", "larger is better"], slopes)
    return markdown(["model", "parameters", *header], rows) + (f"\n{lines}" if slopes else "")


def size_claims(records: Sequence[Record]) -> list[Claim]:
    """Return whether larger models are more accurate, on the photographs and after the transfer."""
    slopes = {images: gain_per_doubling(tuned_sizes(records, experiment)) for images, experiment in TRAINED.items()}
    points = [f"{images} {100 * slope.mean:+z.2f}" for images, slope in slopes.items() if slope is not None]
    return [
        Claim(
            "larger models are more accurate, at laptop scale (figure 1a)",
            "a strong correlation on ImageNet, among several families",
            f"points of top-1 per doubling of the parameters: {', '.join(points)}" if points else NOT_RUN,
            verdict=format_verdicts(slopes.items(), ".2%"),
        )
    ]


def size_cells(records: Sequence[Record]) -> list[Cell]:
    """Return a cell per training, those that chose a learning rate too."""
    sizes = [size for experiment in TRAINED.values() for size in tuned_sizes(records, experiment).values()]
    return [Cell(run.experiment, run, {}) for size in sizes for run in (*size.runs.values(), *size.searched)]


def size_arms(records: Sequence[Record]) -> list[Arm]:
    """Return what was trained alike: each size, on each set of images."""
    question = "are larger models more accurate, and better when transferred?"
    arms = []
    for images, experiment in TRAINED.items():
        sizes = tuned_sizes(records, experiment)
        for num_filters, size in sizes.items():
            runs = list(size.runs.values())
            items = f"{count_images(runs):,} images"
            name = f"AmoebaNet-B (3,{num_filters}), {images}"
            arms.append(Arm(question, name, experiment, runs, size.searched, test_items=items))
        if not sizes:
            arms.append(Arm(question, f"AmoebaNet-B (3,8) to (3,40), {images}", experiment, ()))
    return arms


def _describe(size: Tuned | None) -> list[str]:
    """Return the learning rate, the mean accuracy, its deviation, and the number of runs."""
    if size is None:
        return ["", "not run", "", "0"]
    top1 = list(size.top1.values())
    deviation = f"{stdev(top1):.2%}" if len(top1) > 1 else ""
    return [f"{size.rate:g}", f"{fmean(top1):.2%}", deviation, str(len(top1))]


def _top1(run: Record, images: str) -> float:
    return float(run.results["evaluation"][images]["top1"])
