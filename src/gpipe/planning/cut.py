"""Cut a model into stages: by costs, by memory, or for the shortest simulated step.

The shortest step is found by search. Every cut has a bound that its step cannot beat: the work of a device, after the
first micro-batch has reached it and before the last gradient has left the first stage. Cuts are simulated in the order
of their bounds until the next bound is no better than the best step; those that exceed the memory limit are skipped.
The result is exact if all cuts can be listed and few enough need simulating. For larger models the search starts from
equal stages and moves one boundary at a time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, combinations, pairwise, starmap
from math import comb
from typing import TypeAlias

from gpipe.pipeline.partition import check_partitions
from gpipe.pipeline.schedule import Kind
from gpipe.planning.accelerator import GIB, LayerSeconds, Speed
from gpipe.planning.evaluation import Evaluation
from gpipe.planning.exact_cut import CutObjective, partition_layers
from gpipe.planning.memory import stage_memory
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Setting, plan_memory, plan_step

_COSTS = ("seconds", "flops", "parameter_bytes", "memory")
_OBJECTIVES = ("step", "max", "variance")
_MOST_CUTS = 20_000  # to list
_MOST_TASKS = 2**17  # tasks times devices to simulate in one search: well below a second
_Score: TypeAlias = tuple[float, ...]
_Bounds: TypeAlias = tuple[tuple[int, int], ...]  # the first layer of each stage, and the one after its last


class NoCutFits(ValueError):
    """No cut is within the memory limit."""


@dataclass(frozen=True)
class Cutter:
    """Chooses the number of layers of each stage.

    Attributes:
        partition_by: the cost of a layer: "seconds", "flops", "parameter_bytes" or "memory".
        objective: "step", with seconds, finds the shortest simulated step; it balances other costs as "max" does. "max"
            and "variance" are those of `partition_layers`. Memory has an objective of its own: the lowest peak.
        speed: of a device.
        seconds: profiles -> the seconds of each layer and the loss; None plans them with `speed`.
        memory_limit_bytes: the most that a device may need at its peak; None: no limit.
        partitions: the result for settings with as many stages; None chooses it.

    Raises:
        ValueError: `partition_by` or `objective` is unknown.
    """

    partition_by: str
    objective: str
    speed: Speed
    seconds: Callable[[Sequence[LayerProfile]], Sequence[LayerSeconds]] | None = None
    memory_limit_bytes: int | None = None
    partitions: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, words in (("partition_by", _COSTS), ("objective", _OBJECTIVES)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(words)}.")

    def __call__(
        self, profiles: Sequence[LayerProfile], setting: Setting, evaluation: Evaluation | None = None
    ) -> list[int]:
        """Return the number of layers of each stage; an evaluation must be within the limit too.

        Raises:
            NoCutFits: no cut is within the limit.
            ValueError: more stages than layers.
        """
        limit, peaks = self.memory_limit_bytes, _Peaks(profiles, setting, evaluation)
        if self.partitions is not None and len(self.partitions) == setting.num_stages:
            check_partitions(self.partitions, len(profiles) - 1)
            found = list(self.partitions)
        elif self.partition_by == "memory":
            found = partition_by_memory(profiles, setting, evaluation)
        else:
            found = self._choose(profiles, replace(setting, is_sequential=False), evaluation, peaks)
        if limit is None:
            return found
        is_known = setting.leanest is setting  # otherwise memory decides what is recomputed, and more is kept
        needed = max(peaks.find(found)) if is_known else peak_bytes(profiles, found, setting, evaluation)
        if needed > limit:
            trains = peak_bytes(profiles, found, setting) <= limit
            when, remedy = (" in an evaluation", ", or lower trainer.evaluation.batch_size") if trains else ("", "")
            raise NoCutFits(
                f"pipeline.memory_limit_bytes is {limit}, but the fullest device of the partitions {found} needs "
                f"{needed} ({needed / GIB:.3g} GiB){when}: raise the limit, pipeline.num_stages or "
                f"pipeline.num_microbatches{remedy}."
            )
        return found

    def _choose(
        self, profiles: Sequence[LayerProfile], setting: Setting, evaluation: Evaluation | None, peaks: _Peaks
    ) -> list[int]:
        seconds = list(self.seconds(profiles) if self.seconds else self.speed.seconds(profiles))
        costs = self._costs(profiles, seconds)
        objective: CutObjective = "variance" if self.objective == "variance" else "max"
        start = partition_layers(costs, setting.num_stages, objective=objective)
        simulates = self.partition_by == "seconds" and self.objective == "step"
        limit = self.memory_limit_bytes

        def fits(partitions: Sequence[int]) -> bool:
            return limit is None or all(needed <= limit for needed in peaks.find(partitions))

        def step(partitions: Sequence[int]) -> _Score:
            return (plan_step(profiles, seconds, partitions, setting, self.speed).step_seconds,)

        if not fits(start):
            start = partition_by_memory(profiles, setting, evaluation)
            if not fits(start):
                return start
        elif not simulates:
            return start
        spread = partial(_spread, costs=costs, objective=objective)
        bound, score = (_StepBound(profiles, seconds, setting, self.speed), step) if simulates else (spread, spread)
        # A number of cuts, not a time, so that every machine finds the same one.
        num_tries = max(4, _MOST_TASKS // (sum(map(len, setting.tasks)) * len(setting.tasks)))
        return _search(start, bound, score, num_tries, fits)

    def _costs(self, profiles: Sequence[LayerProfile], seconds: Sequence[LayerSeconds]) -> Sequence[float]:
        """Return what each layer costs; the last one's seconds include the loss."""
        if self.partition_by == "flops":
            return [profile.forward_flops for profile in profiles[:-1]]
        if self.partition_by == "parameter_bytes":
            return [profile.parameter_bytes for profile in profiles[:-1]]
        costs = [layer.total for layer in seconds]
        return [*costs[:-2], costs[-2] + costs[-1]]


def partition_by_memory(
    profiles: Sequence[LayerProfile], setting: Setting, evaluation: Evaluation | None = None
) -> list[int]:
    """Return the number of layers of each stage that minimises the largest peak memory of a device.

    This is exact with one stage per device. If devices have several, cuts are searched as for the shortest step.

    Args:
        profiles: of each layer and the loss.
        setting: how the model is run.
        evaluation: its peaks count too.

    Raises:
        ValueError: there are more stages than layers.
    """
    num_layers, num_stages = len(profiles) - 1, setting.num_stages
    peak = _Peaks(profiles, setting, evaluation)
    equal = partition_layers([max(0, peak.least(layer, layer + 1)) for layer in range(num_layers)], num_stages)
    if setting.stages_per_device > 1:
        return _search(equal, peak.rank, peak.rank)
    most = max(peak.find(equal))
    # The best cut of the first layers into the stages so far, by where it ends: its peak, and the ends of its stages.
    reached: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(num_stages):
        after = num_stages - 1 - stage  # each needs at least one layer
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (peak_before, ends) in reached.items():
            for end in range(start + 1, num_layers - after + 1):
                if peak.least(start, end) > most:
                    break  # a longer stage needs at least as much
                if peak.least(end, num_layers) > after * most or (after == 0 and end < num_layers):
                    continue  # too much would be left for the stages after it
                found = max(peak_before, peak(stage, ((start, end),)))
                if found <= most and (end not in longer or found < longer[end][0]):
                    longer[end] = found, (*ends, end)
        reached = longer
    _, ends = reached[num_layers]
    return [end - start for start, end in pairwise([0, *ends])]


class _Peaks:
    """The peak memory of a device by the layers of its stages; computed once, also for other devices with equal tasks.

    If memory decides what is recomputed, it is the peak with the fewest graphs. A longer stage may need less, as sizes
    of boundaries differ, for example in a U-Net.
    """

    def __init__(self, profiles: Sequence[LayerProfile], setting: Setting, evaluation: Evaluation | None) -> None:
        self._setting, self._evaluation = setting.leanest, evaluation
        least = (
            profile.parameter_bytes + int(profile.trainable_bytes * setting.state_ratio) + profile.kept_bytes
            for profile in profiles
        )
        self._least = list(accumulate(least, initial=0))
        kinds: dict[object, int] = {}
        # The first stage of each device has the device's number.
        self._kinds = [
            kinds.setdefault((device == 0, tuple((t.kind, t.stage - device, t.micro_batch) for t in tasks)), len(kinds))
            for device, tasks in enumerate(self._setting.tasks)
        ]
        self._add_up = cache(partial(stage_memory, profiles))
        self._add_up_evaluated = cache(partial(stage_memory, evaluation.profiles if evaluation else ()))
        self._peaks: dict[tuple[int, _Bounds], int] = {}

    def __call__(self, device: int, bounds: _Bounds) -> int:
        """Return the bytes that a device needs whose stages have the bounds `bounds`."""
        key = self._kinds[device], bounds
        if key not in self._peaks:
            walk, ratios = self._setting.walks[device], self._setting.ratios
            found = walk.measure(dict(zip(walk.stages, starmap(self._add_up, bounds), strict=True)), ratios).peak_bytes
            if (evaluation := self._evaluation) is not None:
                own = dict(zip(walk.stages, starmap(self._add_up_evaluated, bounds), strict=True))
                found = max(found, evaluation.measure(own, ratios))
            self._peaks[key] = found
        return self._peaks[key]

    def find(self, partitions: Sequence[int]) -> Iterator[int]:
        """Yield the bytes that each device of a cut needs."""
        bounds = list(pairwise(accumulate(partitions, initial=0)))
        for device, walk in enumerate(self._setting.walks):
            yield self(device, tuple(bounds[stage] for stage in walk.stages))

    def rank(self, partitions: Sequence[int]) -> _Score:
        """Return the bytes of the devices of a cut, the fullest first."""
        return tuple(sorted(self.find(partitions), reverse=True))

    def least(self, first: int, end: int) -> int:
        """Return the least bytes that layers need: parameters, the optimiser's state, the graph of one micro-batch."""
        return self._least[end] - self._least[first]


def peak_bytes(
    profiles: Sequence[LayerProfile],
    partitions: Sequence[int],
    setting: Setting,
    evaluation: Evaluation | None = None,
) -> int:
    """Return the memory of the fullest device, in training or in an evaluation."""
    evaluated = () if evaluation is None else evaluation.plan(partitions, setting)
    return max(*(memory.peak_bytes for memory in plan_memory(profiles, partitions, setting)), *evaluated, 0)


def _search(
    start: Sequence[int],
    bound: Callable[[Sequence[int]], _Score],
    score: Callable[[Sequence[int]], _Score],
    num_tries: int = sys.maxsize,
    fits: Callable[[Sequence[int]], bool] = lambda _: True,
) -> list[int]:
    """Return the cut with the lowest score, `start` where none is better.

    Args:
        start: where the search begins, which fits.
        bound: what the score of a cut cannot be below.
        score: of a cut.
        num_tries: how many cuts are scored at most.
        fits: whether a cut may be taken, found in much less time than its score.
    """
    best, found = list(start), score(start)
    tries = iter(range(num_tries))

    def improve(candidates: Iterable[list[int]]) -> Iterator[list[int]]:
        """Yield each candidate that beats all before it."""
        nonlocal best, found
        for limit, candidate in sorted((bound(candidate), candidate) for candidate in candidates):
            if limit >= found:
                return
            if not fits(candidate):
                continue
            if next(tries, None) is None:
                return
            if (tried := score(candidate)) < found:
                best, found = candidate, tried
                yield candidate

    num_layers, num_stages = sum(start), len(start)
    if comb(num_layers - 1, num_stages - 1) <= _MOST_CUTS:
        for _ in improve(_all_cuts(num_layers, num_stages)):
            pass
        return best
    while next(improve(_neighbours(best)), None) is not None:
        pass
    return best


def _all_cuts(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield [end - start for start, end in pairwise((0, *inner, num_layers))]


def _neighbours(partitions: Sequence[int]) -> Iterator[list[int]]:
    """Yield the cuts in which one boundary is moved by one layer."""
    for stage in range(len(partitions) - 1):
        for given, taken in ((stage, stage + 1), (stage + 1, stage)):
            if partitions[given] > 1:
                moved = list(partitions)
                moved[given] -= 1
                moved[taken] += 1
                yield moved


def _spread(partitions: Sequence[int], costs: Sequence[float], objective: CutObjective) -> _Score:
    """Return what `partition_layers` minimises: the variance, or the maximum and then the variance."""
    bounds = pairwise(accumulate(partitions, initial=0))
    sums = [sum(costs[first:end]) for first, end in bounds]
    squares = sum(value**2 for value in sums)
    return (squares,) if objective == "variance" else (max(sums), squares)


class _StepBound:
    """A lower bound of the seconds of a cut's step.

    A device cannot begin before a micro-batch has passed all stages before its first one, and after its last backward
    the gradient has to go back through them. In between it does all of its tasks, except gradients of weights, which it
    may make while the gradient goes back.
    """

    def __init__(
        self, profiles: Sequence[LayerProfile], seconds: Sequence[LayerSeconds], setting: Setting, speed: Speed
    ) -> None:
        merged = [*seconds[:-2], LayerSeconds.add_up(seconds[-2:])]
        self._counts = Counter((task.kind, task.stage) for tasks in setting.tasks for task in tasks)
        kinds = {kind for kind, _ in self._counts}
        self._seconds = {kind: list(accumulate((layer.of(kind) for layer in merged), initial=0.0)) for kind in kinds}
        (self._backward,) = (kind for kind in kinds if kind.makes_gradients)
        self._send = [speed.transfer_seconds(profile.boundary_bytes) for profile in profiles]
        self._return = [speed.transfer_seconds(profile.returned_bytes) for profile in profiles]
        self._placement = setting.placement

    def __call__(self, partitions: Sequence[int]) -> _Score:
        num_devices = max(self._placement) + 1
        work, later = [0.0] * num_devices, [0.0] * num_devices
        there = back = 0.0
        ramps = []
        for stage, (first, end) in enumerate(pairwise(accumulate(partitions, initial=0))):
            taken = {kind: values[end] - values[first] for kind, values in self._seconds.items()}
            device = self._placement[stage]
            for kind, value in taken.items():
                part = later if kind is Kind.WEIGHT_GRADIENTS else work
                part[device] += self._counts[kind, stage] * value
            ramps.append((there, back))
            there += taken[Kind.FORWARD] + self._send[end]
            back += taken[self._backward] + self._return[end]
        rows = zip(work, later, ramps, strict=False)  # device d's first stage is stage d
        return (max(there + own + max(waiting, back) for own, waiting, (there, back) in rows),)
