"""The plan of a training step: the memory and the seconds of each device, the bubble, the utilisation.

Memory is found by a walk through the schedule's tasks (memory.py), time by simulating the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from gpipe.pipeline.schedule import Kind, Rematerialization, Rematerialize, StepSchedule, Task, sequential
from gpipe.pipeline.schedules.choice import check_rematerialization, place_stages
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.accelerator import LayerSeconds, Speed
from gpipe.planning.fit import Fit, Order, fit_graphs, walk_device
from gpipe.planning.memory import DeviceMemory, StageMemory, StateRatios, Walk, stage_memory
from gpipe.planning.profile import LayerProfile
from gpipe.planning.simulation import Simulation, simulate


@dataclass(frozen=True)
class Setting:
    """How a model is run.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        rematerialize: which micro-batches are recomputed; `Fit` until a cut is known, which then decides it.
        schedule: a name of `gpipe.pipeline.schedule`.
        stages_per_device: 1, or more if the schedule interleaves.
        state_ratio: bytes of optimiser state and averages per byte of trainable parameters.
        shared_ratio: likewise for the state that replicas shard, over all of them; None if each updates all parameters.
        update_ratio: bytes that the update of a whole model allocates temporarily, per byte of trainable parameters.
        largest_update_ratio: bytes that it allocates on top, per byte of the largest parameter.
        num_replicas: R pipelines, which split a mini-batch and average their gradients.
        synchronize_batch_norm: whether batch norms normalise over the replicas; the memory of their statistics is
            planned, the time of their exchanges is not.
        is_sequential: whether one process plays all stages, one task after another. Memory is still planned per device.

    Raises:
        TypeError, ValueError: there is no such mode of re-materialisation, or not one number per stage.
    """

    num_stages: int
    num_microbatches: int
    rematerialize: Rematerialization | Fit = Rematerialize.ALWAYS
    schedule: str = "gpipe"
    stages_per_device: int = 1
    state_ratio: float = 1.0
    shared_ratio: float | None = None
    update_ratio: float = 0.0
    largest_update_ratio: float = 0.0
    num_replicas: int = 1
    synchronize_batch_norm: bool = False
    is_sequential: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rematerialize, Fit):
            mode = check_rematerialization(self.rematerialize, self.num_stages)
            object.__setattr__(self, "rematerialize", mode)

    @property
    def num_devices(self) -> int:
        """The number of devices over all replicas."""
        return self.num_replicas * self.num_stages // self.stages_per_device

    @property
    def ratios(self) -> StateRatios:
        """The bytes that belong to the parameters of one device, per byte of them."""
        own = self.state_ratio, self.update_ratio, self.largest_update_ratio
        if self.shared_ratio is None:
            return StateRatios(*own)
        return StateRatios(*own, self.shared_ratio, self.num_replicas)

    @property
    def synchronizes(self) -> bool:
        """Whether statistics travel between replicas."""
        return self.synchronize_batch_norm and self.num_replicas > 1

    @property
    def order(self) -> Order:
        """What decides the tasks, apart from recomputations."""
        shape = self.schedule, self.num_stages, self.num_microbatches, self.stages_per_device
        return Order(*shape, self.synchronizes, self.num_replicas > 1)

    @cached_property
    def tasks(self) -> StepSchedule:
        """The ordered tasks of each device; without recomputations as long as these are undecided."""
        return self.order.tasks(Rematerialize.NEVER if isinstance(self.rematerialize, Fit) else self.rematerialize)

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """What each device holds at once while it runs its tasks."""
        mode, found = self.rematerialize, []
        assert not isinstance(mode, Fit), "a cut must decide it first"
        for device in range(max(self.placement) + 1):
            own = mode
            if isinstance(mode, tuple):
                own = tuple(count for count, place in zip(mode, self.placement, strict=True) if place == device)
            found.append(walk_device(self.order, device, own))
        return tuple(found)

    @property
    def leanest(self) -> Setting:
        """The same setting with the fewest graphs at once that it may have."""
        return replace(self, rematerialize=Rematerialize.ALWAYS) if isinstance(self.rematerialize, Fit) else self

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage."""
        return place_stages(self.schedule, self.num_stages, self.stages_per_device)


@dataclass(frozen=True)
class StagePlan:
    """One stage and its work per micro-batch.

    Attributes:
        first_layer: the first of its layers.
        last_layer: the last of its layers; the loss, which the last stage computes, does not count.
        parameters: their number.
        forward_flops: FLOPs of a forward.
        flops: FLOPs of a forward and a backward.
        work: the seconds of its layers.
        output_bytes: bytes that travel to the next stage; 0 in the last stage.
        transfer_seconds: seconds to send these.
        return_seconds: seconds to send back their gradients; integers, such as tokens, have none.
        task_seconds: what the engine adds to each task.
    """

    first_layer: int
    last_layer: int
    parameters: int
    forward_flops: int
    flops: int
    work: LayerSeconds
    output_bytes: int
    transfer_seconds: float
    return_seconds: float
    task_seconds: float

    def seconds(self, kind: Kind) -> float:
        """Return the seconds of a task."""
        return self.work.of(kind) + self.task_seconds


@dataclass(frozen=True)
class Plan:
    """A training step of one pipeline.

    Attributes:
        setting: how the model is run, including what is recomputed.
        stages: K of them.
        memory: of each device.
        timeline: the simulated tasks.
        averaging_seconds: how long the averaging of gradients over the replicas goes on after the last task. A device
            starts averaging when its own last task ends, while others still work.
        update_seconds: of the optimiser, of exchanging what replicas update for each other, and of the copies that
            autocast then makes, on the slowest device.
        utilization: FLOPs of the model, without recomputation, over what all devices could do in that time at their
            peak.
        tied_parameters: how many more parameters the stages have than the model: stages have copies of tied ones.
        auxiliary_parameters: the number of the model's parameters that only training uses.
        batch_size: N, the examples of a mini-batch over all replicas; 0 if unknown.
        evaluation_bytes: the memory of each device in an evaluation; empty if there is none.
    """

    setting: Setting
    stages: tuple[StagePlan, ...]
    memory: tuple[DeviceMemory, ...]
    timeline: Timeline
    averaging_seconds: float
    update_seconds: float
    utilization: float
    tied_parameters: int = 0
    auxiliary_parameters: int = 0
    batch_size: int = 0
    evaluation_bytes: tuple[int, ...] = ()

    @property
    def partitions(self) -> list[int]:
        """The number of layers of each stage."""
        return [stage.last_layer - stage.first_layer + 1 for stage in self.stages]

    @property
    def kept_graphs(self) -> list[int] | None:
        """How many micro-batches' graphs each stage keeps at once; None if a mode decides that."""
        mode = self.setting.rematerialize
        return list(mode) if isinstance(mode, tuple) else None

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, a tied one counted once."""
        return sum(stage.parameters for stage in self.stages) - self.tied_parameters

    @property
    def evaluated_parameters(self) -> int:
        """The number of parameters of the evaluated network."""
        return self.parameters - self.auxiliary_parameters

    @property
    def microbatch_size(self) -> int:
        """Examples of the largest micro-batch."""
        return -(-self.batch_size // (self.setting.num_replicas * self.setting.num_microbatches))

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the tasks, then the averaging, then the update."""
        return self.timeline.makespan_seconds + self.averaging_seconds + self.update_seconds

    @property
    def bubble(self) -> float | None:
        """The simulated bubble; None if one process plays all stages, so that none waits."""
        return None if self.setting.is_sequential else self.timeline.bubble

    @cached_property
    def equal_stages_bubble(self) -> float | None:
        """The bubble if all stages were equal and links took no time; None if one process plays all stages.

        Without recomputation it is (K-1)/(M+K-1) (section 2), and with P devices of v stages each (P-1)/(vM+P-1)
        (Narayanan et al. 2021, section 2.2.2). Recomputation fills part of it.
        """
        if self.setting.is_sequential:
            return None
        mean = {kind: fmean(stage.seconds(kind) for stage in self.stages) for kind in Kind}
        return simulate(self.setting.tasks, lambda task: mean[task.kind]).bubble

    @property
    def imbalance(self) -> float:
        """How much longer the tasks of the slowest stage take than those of the mean one, as a fraction."""
        seconds = [0.0] * len(self.stages)
        for task, start, end in self.timeline.events:
            seconds[task.stage] += end - start
        return max(seconds) / fmean(seconds) - 1

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest device, in training or in an evaluation."""
        return max(*(memory.peak_bytes for memory in self.memory), *self.evaluation_bytes, 0)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per stage, of JSON's types."""
        rows = []
        for index, stage in enumerate(self.stages):
            row = {"stage": index, **asdict(stage)}
            rows.append(row | {f"{name}_seconds": value for name, value in row.pop("work")._asdict().items()})
        return rows


def plan_step(
    profiles: Sequence[LayerProfile],
    layer_seconds: Sequence[LayerSeconds],
    partitions: Sequence[int],
    setting: Setting,
    speed: Speed,
    layer_update_seconds: Sequence[float] | None = None,
) -> Plan:
    """Plan a step.

    Args:
        profiles: of each layer and the loss, with the largest micro-batch.
        layer_seconds: likewise, planned (`Speed.seconds`) or measured.
        partitions: the number of layers of each stage.
        setting: how the model is run.
        speed: of a device; for transfers, for what the engine adds to a task, for the utilisation, and for the update
            if that was not measured.
        layer_update_seconds: the optimiser's measured seconds for each layer; None plans them.
    """
    bounds = list(pairwise(accumulate(partitions, initial=0)))
    setting = settle(profiles, partitions, setting)
    stages = tuple(_plan_stage(profiles, layer_seconds, first, end, speed) for first, end in bounds)

    def transfer_seconds(task: Task) -> float:
        """Outputs travel forward, the gradients of inputs back over the boundary before."""
        if task.kind.makes_gradients:
            return stages[task.stage - 1].return_seconds
        return stages[task.stage].transfer_seconds

    assert not isinstance(setting.rematerialize, Fit), "it is settled"
    seconds = {(kind, stage): one.seconds(kind) for stage, one in enumerate(stages) for kind in Kind}
    simulation = _make_simulation(setting.order, setting.rematerialize, setting.is_sequential)
    timeline = simulation(lambda task: seconds[task.kind, task.stage], transfer_seconds)
    memory = plan_memory(profiles, partitions, setting)
    if layer_update_seconds is None:
        # The optimiser reads and writes all that belongs to parameters. Autocast reads weights and writes half as much.
        moved = (2 * device.parameter_bytes + 3 * device.converted_bytes for device in memory)
        updates = [size / speed.bytes_per_second for size in moved]
    else:
        updates = [0.0] * len(memory)
        for device, (first, end) in zip(setting.placement, bounds, strict=True):
            updates[device] += sum(layer_update_seconds[first:end])
    if setting.ratios.num_sharers > 1:  # each parameter comes from the replica that updates it
        rows = zip(updates, memory, strict=True)
        updates = [seconds + device.gradient_bytes / speed.link_bytes_per_second for seconds, device in rows]
    ends = _averaging_seconds(memory, timeline, setting, speed), sum(updates) if setting.is_sequential else max(updates)
    flops = setting.num_microbatches * sum(stage.flops for stage in stages)
    possible = (timeline.makespan_seconds + sum(ends)) * timeline.num_devices * speed.peak_flops_per_second
    tied = sum(profile.tied_parameters for profile in profiles)
    return Plan(setting, stages, memory, timeline, *ends, flops / possible, tied)


# A simulation does not depend on the cut, and many cuts are planned.
@lru_cache(maxsize=64)
def _make_simulation(order: Order, mode: Rematerialization, is_sequential: bool) -> Simulation:
    tasks = order.tasks(mode)
    return Simulation([sequential(tasks)] if is_sequential else tasks)


def plan_memory(
    profiles: Sequence[LayerProfile], partitions: Sequence[int], setting: Setting
) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device."""
    setting = settle(profiles, partitions, setting)
    devices = place_memory(profiles, partitions, setting)
    return tuple(walk.measure(own, setting.ratios) for walk, own in zip(setting.walks, devices, strict=True))


def settle(profiles: Sequence[LayerProfile], partitions: Sequence[int], setting: Setting) -> Setting:
    """Return the setting with recomputation decided, if that was left to the memory of the devices."""
    if not isinstance(setting.rematerialize, Fit):
        return setting
    devices = place_memory(profiles, partitions, setting)
    room = setting.rematerialize.memory_bytes
    return replace(setting, rematerialize=fit_graphs(setting.order, devices, setting.ratios, room))


def place_memory(
    profiles: Sequence[LayerProfile], partitions: Sequence[int], setting: Setting
) -> list[dict[int, StageMemory]]:
    """Return what each stage holds, device by device."""
    devices: list[dict[int, StageMemory]] = [{} for _ in range(max(setting.placement) + 1)]
    for stage, (first, end) in enumerate(pairwise(accumulate(partitions, initial=0))):
        devices[setting.placement[stage]][stage] = stage_memory(profiles, first, end)
    return devices


def _averaging_seconds(memory: Sequence[DeviceMemory], timeline: Timeline, setting: Setting, speed: Speed) -> float:
    """Return how long after the last task the gradients of some device are still being averaged over its replicas."""
    if setting.num_replicas == 1:
        return 0.0
    makespan = timeline.makespan_seconds
    last = [makespan if setting.is_sequential else 0.0] * len(memory)
    if not setting.is_sequential:
        for task, _, end in timeline.events:
            last[timeline.row(task)] = max(last[timeline.row(task)], end)
    seconds = 2 * (setting.num_replicas - 1) / setting.num_replicas / speed.link_bytes_per_second
    ends = (end + seconds * device.gradient_bytes for end, device in zip(last, memory, strict=True))
    return max(*ends, makespan) - makespan


def _plan_stage(
    profiles: Sequence[LayerProfile], layer_seconds: Sequence[LayerSeconds], first: int, end: int, speed: Speed
) -> StagePlan:
    last_layer = end - 1
    is_last = end == len(profiles) - 1
    if is_last:
        end += 1  # the loss
    own = profiles[first:end]
    output_bytes, returned_bytes = (0, 0) if is_last else (profiles[end].boundary_bytes, profiles[end].returned_bytes)
    forward_flops = sum(profile.forward_flops for profile in own)
    return StagePlan(
        first_layer=first,
        last_layer=last_layer,
        parameters=sum(profile.parameters for profile in own),
        forward_flops=forward_flops,
        flops=forward_flops + sum(profile.backward_flops for profile in own),
        work=LayerSeconds.add_up(layer_seconds[first:end]),
        output_bytes=output_bytes,
        transfer_seconds=speed.transfer_seconds(output_bytes),
        return_seconds=speed.transfer_seconds(returned_bytes),
        task_seconds=speed.task_seconds,
    )
