"""One model on accelerators of one kind: the plan of a step, and what would fit if it does not."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.planning.accelerator import Accelerator, LayerSeconds, Speed
from gpipe.planning.cut import NoCutFits, partition_by_memory, peak_bytes
from gpipe.planning.evaluation import Evaluation, EvaluationPlanner
from gpipe.planning.fit import Fit
from gpipe.planning.interpolation import KnownProfiles, Profiler
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Plan, Setting, plan_step

Cut = Callable[[Sequence[LayerProfile], Setting, Evaluation | None], list[int]]
"""(profiles, setting, evaluation) -> the number of layers of each stage; raises ValueError if there is no such cut."""


@dataclass
class Planner:
    """Plans steps of one model with one mini-batch.

    Attributes:
        profiler: describes the model; its results are cached.
        cut: chooses the partitions; its results are cached.
        batch_size: N, the examples of a mini-batch over all replicas.
        accelerator: what each stage runs on.
        speed: what the accelerator reaches.
        auxiliary_parameters: the number of the model's parameters that only training uses.
        min_microbatch_size: the fewest examples that batch norm may see at once; settings with fewer are refused.
        seconds: profiles -> the seconds of each layer and the loss; None plans them with `speed`.
        evaluation: plans the memory of evaluations, which must fit too; None if there are none.
        varies_in_length: whether examples vary in length: they are planned with the greatest length, and a mini-batch
            of shorter ones has more of them.
    """

    profiler: Profiler
    cut: Cut
    batch_size: int
    accelerator: Accelerator
    speed: Speed
    auxiliary_parameters: int = 0
    min_microbatch_size: int = 1
    seconds: Callable[[Sequence[LayerProfile]], Sequence[LayerSeconds]] | None = None
    evaluation: EvaluationPlanner | None = None
    varies_in_length: bool = False

    def __post_init__(self) -> None:
        self._profile = cache(self.profiler)
        self._find_seconds = cache(lambda size: list((self.seconds or self.speed.seconds)(self._profile(size))))
        self._cut = cache(lambda setting: self.cut(*self._profiles_for(setting), self._evaluate(setting)))

    def plan(self, setting: Setting) -> Plan:
        """Plan a step.

        Raises:
            ValueError: the model cannot be cut like this.
        """
        profiles, seconds, shortened = self.describe(setting)
        partitions, evaluation = self._cut(setting), self._evaluate(setting)
        found = plan_step(profiles, seconds, partitions, shortened, self.speed)
        if self.varies_in_length and shortened != setting:
            found = self._with_shorter(found, setting)
        return replace(
            found,
            auxiliary_parameters=self.auxiliary_parameters,
            batch_size=self.batch_size,
            evaluation_bytes=() if evaluation is None else evaluation.plan(partitions, setting),
        )

    def _with_shorter(self, found: Plan, setting: Setting) -> Plan:
        """Return the plan of a mini-batch of shorter examples; memory and stages stay those of the longest."""
        profiles, seconds, setting = self.describe_work(setting)
        share = found.setting.num_microbatches / setting.num_microbatches
        setting = replace(found.setting, num_microbatches=setting.num_microbatches)
        timed = plan_step(profiles, seconds, found.partitions, setting, self.speed)
        return replace(timed, stages=found.stages, memory=found.memory, utilization=share * timed.utilization)

    def describe_work(self, setting: Setting) -> tuple[list[LayerProfile], list[LayerSeconds], Setting]:
        """Return what `describe` does; if examples vary in length, shorter ones make all M micro-batches.

        Together they are as much work as the longest, and as many bytes travel.
        """
        profiles, seconds, shortened = self.describe(setting)
        if not self.varies_in_length:
            return profiles, seconds, shortened
        share = shortened.num_microbatches / setting.num_microbatches
        seconds = [LayerSeconds(*(share * value for value in layer)) for layer in seconds]
        return [profile.with_boundary(share) for profile in profiles], seconds, setting

    def describe(self, setting: Setting) -> tuple[list[LayerProfile], list[LayerSeconds], Setting]:
        """Return profiles and seconds with the largest micro-batch, and the setting with the actual number of them.

        Raises:
            ValueError: micro-batches would be too small for batch norm, or cannot be described.
        """
        sizes = self._split(setting)
        size = max(sizes)
        return self._profile(size), self._find_seconds(size), replace(setting, num_microbatches=len(sizes))

    def find_microbatch_size(self, setting: Setting) -> int | None:
        """Return the size of the largest micro-batch; None if the smallest has too few examples for batch norm."""
        try:
            return max(self._split(setting))
        except ValueError:
            return None

    def peak_bytes(self, setting: Setting) -> int:
        """Return the memory of the fullest device.

        Raises:
            ValueError: the model cannot be cut like this.
        """
        profiles, shortened = self._profiles_for(setting)
        return peak_bytes(profiles, self._cut(setting), shortened, self._evaluate(setting))

    def _evaluate(self, setting: Setting) -> Evaluation | None:
        return None if self.evaluation is None else self.evaluation.describe(setting)

    def fits(self, setting: Setting) -> bool:
        """Return whether each device has enough memory, and stays within the limit of the cut if that has one."""
        room = self.accelerator.memory_bytes
        try:
            return self._find_least_peak_bytes(setting) <= room and self.peak_bytes(setting) <= room
        except NoCutFits:
            return False

    def _find_least_peak_bytes(self, setting: Setting) -> int:
        """Return the memory of the fullest device with the best cut by memory.

        It is found much faster than the cut of a run, and most settings that do not fit exceed the memory even with it.
        If devices have several stages, this uses the cut of the run.
        """
        if setting.stages_per_device > 1:
            return self.peak_bytes(setting)
        profiles, shortened = self._profiles_for(setting)
        evaluation = self._evaluate(setting)
        return peak_bytes(profiles, partition_by_memory(profiles, shortened, evaluation), shortened, evaluation)

    def remedies(self, setting: Setting) -> list[str]:
        """Return what would fit: the smallest larger K, and the smallest of 2 M, 4 M and so on."""
        found = []
        if isinstance(setting.rematerialize, tuple):  # numbers that fit one cut
            setting = replace(setting, rematerialize=Fit(self.accelerator.room_bytes))
        step = setting.stages_per_device
        num_layers = len(self._profiles_for(setting)[0]) - 1
        larger = range(setting.num_stages + step, num_layers + 1, step)
        for num_stages in larger:
            with suppress(ValueError):  # such as too few examples for batch norm
                if self.fits(replace(setting, num_stages=num_stages)):
                    found.append(f"K = {num_stages}")
                    break
        if (num_microbatches := self._larger_num_microbatches(setting)) is not None:
            found.append(f"M = {num_microbatches}")
        return found

    def _larger_num_microbatches(self, setting: Setting) -> int | None:
        """Return the smallest of 2 M, 4 M and so on that fits; None if none does."""
        least = math.inf
        evaluated = 0 if self.evaluation is None else self.evaluation.batch_size
        numbers = doubled(2 * setting.num_microbatches, max(self.batch_size // setting.num_replicas, evaluated))
        settings = [replace(setting, num_microbatches=number) for number in numbers]
        if isinstance(self.profiler, KnownProfiles):
            found = map(self.find_microbatch_size, settings)
            self.profiler.describe_ends(size for size in found if size is not None)
        for larger in settings:
            try:
                if self.fits(larger):
                    return larger.num_microbatches
                peak = self._find_least_peak_bytes(larger)
            except ValueError:  # such as too few examples for batch norm
                return None
            if self.accelerator.memory_bytes < peak and 0.99 * least < peak:
                return None  # what remains are boundary inputs of the whole mini-batch, for any M
            least = peak
        return None

    def _profiles_for(self, setting: Setting) -> tuple[list[LayerProfile], Setting]:
        """Return the profiles with the largest micro-batch, and the setting with the actual number of micro-batches."""
        sizes = self._split(setting)
        return self._profile(max(sizes)), replace(setting, num_microbatches=len(sizes))

    def _split(self, setting: Setting) -> list[int]:
        """Return how many examples each micro-batch of the first replica has."""
        sizes = microbatch_sizes(-(-self.batch_size // setting.num_replicas), setting.num_microbatches)
        seen = min(sizes) * (setting.num_replicas if setting.synchronize_batch_norm else 1)
        if seen < self.min_microbatch_size:
            raise ValueError(
                f"micro-batches of {seen} examples, expected at least {self.min_microbatch_size} for batch norm: "
                "choose fewer micro-batches or replicas"
            )
        return sizes


def find_largest_size(fits: Callable[[int], bool], start: int, step: int, most: int = sys.maxsize) -> int | None:
    """Return the largest of start, start + step and so on that fits; None if the first does not.

    Args:
        fits: whether a size fits; assumed to hold for all sizes up to some largest one.
        start: the smallest size.
        step: between sizes.
        most: the search ends once a size of at least this fits, although a larger one may fit.
    """
    if not fits(start):
        return None
    good, bad = 0, 1
    while fits(start + bad * step):
        good, bad = bad, 2 * bad
        if start + good * step >= most:
            return start + good * step
    good += bisect_left(range(good + 1, bad), True, key=lambda number: not fits(start + number * step))
    return start + good * step


def doubled(first: int, most: int) -> Iterator[int]:
    """Yield a number, its double and so on while they are below `most`, and then `most`."""
    while first < most:
        yield first
        first *= 2
    yield most
