"""The fastest way to run a model on a number of devices: K x R, M, schedule, cut and re-materialisation together.

Every setting has a bound that its step cannot beat. Settings are first planned with stages of equal seconds, in the
order of their bounds, as long as a bound beats the best found. The best of those are then cut as in a run, again as
long as bounds allow. The result is exact if a run's cut is exact and all remaining settings can be cut like that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias

from gpipe.pipeline.schedule import Rematerialization, Rematerialize
from gpipe.pipeline.schedules.choice import SCHEDULES, SPLIT_SCHEDULES
from gpipe.planning.bound import bound_step
from gpipe.planning.cut import Cutter
from gpipe.planning.fit import Fit
from gpipe.planning.interpolation import KnownProfiles, Profiler
from gpipe.planning.planner import Planner, doubled
from gpipe.planning.step import Plan, Setting

_MOST_STAGES_PER_DEVICE = 4
_MOST_PER_DEVICE = 32  # micro-batches; GPipe's bubble is then about a thirtieth
_Shape: TypeAlias = tuple[int, int, int, str]
_TryPlan: TypeAlias = Callable[[Setting], Plan | None]


@dataclass(frozen=True)
class Space:
    """The settings to try; a field that is None stands for all of its values.

    Attributes:
        num_devices: the number of devices that a setting uses, over all replicas.
        num_stages: K.
        num_microbatches: M; None: 1, 2, 4 and so on, and the most: 32 per device of a replica, or its
            examples if fewer.
        schedule: a name.
        stages_per_device: None: up to 4, or as many as K needs.
        rematerialize: None: `Fit` and EXCEPT_LAST.
        num_replicas: R.
        divided: the number that R divides, such as that of a mini-batch's tokens; None: N.
    """

    num_devices: int
    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages_per_device: int | None = None
    rematerialize: Rematerialization | Fit | None = None
    num_replicas: int | None = None
    divided: int | None = None

    def settings(self, batch_size: int, like: Setting, room_bytes: int) -> Iterator[Setting]:
        """Yield the settings, including those with more stages than the model has layers; the rest is as in `like`."""
        modes: list[Rematerialization | Fit] = [Fit(room_bytes), Rematerialize.EXCEPT_LAST]
        if self.rematerialize is not None:
            modes = [self.rematerialize]
        for num_replicas, per_replica, schedule, per_device in self._shapes():
            num_stages = per_replica * per_device
            if (self.num_stages or num_stages) != num_stages or (self.divided or batch_size) % num_replicas:
                continue
            most = min(-(-batch_size // num_replicas), _MOST_PER_DEVICE * per_replica)
            numbers = [self.num_microbatches] if self.num_microbatches else doubled(1, most)
            for num_microbatches in numbers:
                for mode in modes:
                    yield replace(
                        like,
                        num_stages=num_stages,
                        num_microbatches=num_microbatches,
                        rematerialize=mode,
                        schedule=schedule,
                        stages_per_device=per_device,
                        num_replicas=num_replicas,
                        is_sequential=False,
                    )

    def _shapes(self) -> Iterator[tuple[int, int, str, int]]:
        """Yield R, devices per replica, the schedule, and stages per device."""
        for per_replica in (count for count in range(1, self.num_devices + 1) if self.num_devices % count == 0):
            num_replicas = self.num_devices // per_replica
            if (self.num_replicas or num_replicas) == num_replicas:
                most = max(_MOST_STAGES_PER_DEVICE, self.stages_per_device or 0, (self.num_stages or 0) // per_replica)
                for schedule in [self.schedule] if self.schedule else SCHEDULES:
                    for per_device in _stages_per_device(schedule, most):
                        # On one device no stage waits for the gradients of inputs.
                        is_idle = per_replica == 1 and self.schedule is None
                        if is_idle and (per_device > 1 or schedule in SPLIT_SCHEDULES):
                            continue
                        if (self.stages_per_device or per_device) == per_device:
                            yield num_replicas, per_replica, schedule, per_device


def _stages_per_device(schedule: str, most: int) -> range:
    if schedule == "interleaved_1f1b":
        return range(2, most + 1)
    return range(2, 3) if schedule == "zb_v" else range(1, 2)


def find_fastest(
    planner: Planner,
    space: Space,
    like: Setting,
    room_bytes: int,
    *,
    count: int = 5,
    most_cuts: int = 12,
    on_plan: Callable[[], None] = lambda: None,
) -> list[Plan]:
    """Return the plans of the fastest settings that fit, the fastest first; only the best of each shape.

    Args:
        planner: of the model.
        space: the settings.
        like: gives what the space does not vary.
        room_bytes: the most that a device's planned peak may be.
        count: the number of plans.
        most_cuts: how many settings are cut as in a run, besides those that may be faster than the fastest of them.
        on_plan: called before each plan; what it raises ends the search.
    """
    assert isinstance(planner.cut, Cutter)
    sizes = {
        setting: size
        for setting in space.settings(planner.batch_size, like, room_bytes)
        if (size := planner.find_microbatch_size(setting)) is not None
    }
    cut = replace(planner.cut, memory_limit_bytes=room_bytes)
    estimated = replace(planner, profiler=_estimate(planner.profiler, sizes.values()), cut=cut)
    if (evaluation := planner.evaluation) is not None:
        evaluated = _estimate(evaluation.profiler, map(evaluation.find_microbatch_size, sizes))
        estimated = replace(estimated, evaluation=replace(evaluation, profiler=evaluated))
    rough = replace(estimated, cut=replace(cut, objective="max"))
    bounds = {setting: bound for setting in sizes if (bound := _find_bound(rough, setting)) is not None}
    planned = _plan(partial(_try_plan, rough, on_plan), bounds, sorted(bounds, key=bounds.__getitem__), count)
    try_estimated = partial(_try_plan, estimated, on_plan)
    found = _plan(try_estimated, bounds, _choose(planned, most_cuts), count)
    # Profiles were interpolated: a setting may turn out slower, or not fit.
    precise = replace(planner, cut=cut)
    best: dict[_Shape, Plan] = {}
    for setting in _improve(try_estimated, bounds, found, planned):
        is_shown = len(best) < count and _find_shape(setting) not in best
        if is_shown and (plan := _try_plan(precise, on_plan, setting)) is not None:
            best[_find_shape(setting)] = plan
    return sorted(best.values(), key=lambda plan: plan.step_seconds)


def _estimate(profiler: Profiler, sizes: Iterable[int]) -> KnownProfiles:
    """Return a profiler that interpolates between the smallest and the largest of some sizes."""
    found = KnownProfiles(profiler, estimates=True)
    found.describe_ends(sizes)
    return found


def _find_shape(setting: Setting) -> _Shape:
    """Return R, K, stages per device, and the schedule, which does not matter if one device has all stages."""
    schedule = setting.schedule if setting.num_devices > setting.num_replicas else ""
    return setting.num_replicas, setting.num_stages, setting.stages_per_device, schedule


def _find_bound(planner: Planner, setting: Setting) -> float | None:
    """Return a lower bound of a step's seconds; None if it cannot be planned."""
    try:
        profiles, seconds, setting = planner.describe_work(setting)
    except ValueError:  # such as too few examples for batch norm
        return None
    if setting.num_stages > len(profiles) - 1:
        return None
    return bound_step(profiles, seconds, setting, planner.speed)


def _plan(
    try_plan: _TryPlan, bounds: Mapping[Setting, float], settings: Iterable[Setting], count: int
) -> dict[Setting, float]:
    """Plan the settings that may be among the best; return the seconds of all that were planned, the fastest first."""
    found: dict[Setting, float] = {}
    best: dict[_Shape, float] = {}
    for setting in settings:
        shape, others = _find_shape(setting), sorted(best.values())
        worst = others[count - 1] if len(others) >= count else math.inf
        if bounds[setting] > min(worst, best.get(shape, math.inf)):
            continue
        if (plan := try_plan(setting)) is not None:
            found[setting] = plan.step_seconds
            best[shape] = min(best.get(shape, math.inf), plan.step_seconds)
    return dict(sorted(found.items(), key=itemgetter(1)))


def _improve(
    try_plan: _TryPlan, bounds: Mapping[Setting, float], found: dict[Setting, float], others: Iterable[Setting]
) -> list[Setting]:
    """Add others that may be faster than those found, as the rough cut ignores transfers; return the fastest first."""
    for setting in sorted(others, key=bounds.__getitem__):
        if bounds[setting] >= min(found.values(), default=math.inf):
            break
        if setting not in found and (plan := try_plan(setting)) is not None:
            found[setting] = plan.step_seconds
    return sorted(found, key=found.__getitem__)


def _try_plan(planner: Planner, on_plan: Callable[[], None], setting: Setting) -> Plan | None:
    """Return the plan of a setting; None if there is none, such as when no cut fits the memory."""
    on_plan()
    try:
        return planner.plan(setting)
    except ValueError:
        return None


def _choose(planned: Iterable[Setting], most: int) -> list[Setting]:
    """Return up to `most` settings: first the best of each shape, then the second best, and so on."""
    ranks = Counter[_Shape]()
    rows = []
    for place, setting in enumerate(planned):
        shape = _find_shape(setting)
        rows.append((ranks[shape], place, setting))
        ranks[shape] += 1
    return [setting for _, _, setting in sorted(rows, key=itemgetter(0, 1))[:most]]
