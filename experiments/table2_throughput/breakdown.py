"""Break down a planned step: computing, recomputation, the bubble, unequal stages, links, the update."""

from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from gpipe.pipeline.schedule import Kind, Task
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.simulation import simulate
from gpipe.planning.step import Plan


class Breakdown(NamedTuple):
    """Shares of a step, which add up to 1: what would be left of it if one trouble after the other went away.

    Attributes:
        computing: forwards and backwards, the mean over the devices.
        recomputation: likewise.
        bubble: the wait for other stages that would be left if all stages were equal and transfers took no time.
        imbalance: by how much unequal stages make the step longer.
        transfer: by how much the links make it longer still, the averaging over replicas too.
        update: the optimiser's, on the slowest device.
    """

    computing: float
    recomputation: float
    bubble: float
    imbalance: float
    transfer: float
    update: float


def break_down(plan: Plan) -> Breakdown:
    """Share out the step of a plan whose stages do not share one process."""
    stages = plan.stages
    mean = {kind: fmean(stage.seconds(kind) for stage in stages) for kind in Kind}

    def without_links(seconds: Callable[[Task], float]) -> Timeline:
        return simulate(plan.setting.tasks, seconds)

    even = without_links(lambda task: mean[task.kind])
    without_transfer = without_links(lambda task: stages[task.stage].seconds(task.kind)).makespan_seconds
    recomputation = fmean(even.busy_seconds(Kind.RECOMPUTE))
    busy = fmean(even.busy_seconds())
    parts = Breakdown(
        computing=busy - recomputation,
        recomputation=recomputation,
        bubble=even.makespan_seconds - busy,
        imbalance=without_transfer - even.makespan_seconds,
        transfer=plan.timeline.makespan_seconds - without_transfer + plan.averaging_seconds,
        update=plan.update_seconds,
    )
    return Breakdown(*(part / plan.step_seconds for part in parts))
