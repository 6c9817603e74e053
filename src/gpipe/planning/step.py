"""What a step will take on devices of a kind: the memory and the seconds of each, the bubble, the utilisation.

Memory is that of a walk through the schedule's tasks (memory.py), the step's time that of simulating the same tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gpipe.pipeline.schedule import SCHEDULES, Kind, Rematerialize, StepSchedule, Task
from gpipe.pipeline.timeline import Timeline, simulate
from gpipe.planning.memory import DeviceMemory, StageMemory, device_memory, stage_memory
from gpipe.planning.profile import LayerProfile
from gpipe.planning.speed import LayerSeconds, Speed


@dataclass(frozen=True)
class Setting:
    """How a model is run.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        rematerialize: which micro-batches are recomputed.
        schedule: a name of `gpipe.pipeline.schedule`.
        stages_per_device: 1, or more where the schedule interleaves.
        state_ratio: bytes of optimiser state and averages for each byte of trainable parameters.
        num_replicas: R pipelines, which share a mini-batch out and average their gradients.
        synchronize_batch_norm: whether batch norms normalise over the replicas; the memory of their statistics is
            planned, the time of their exchanges is not.
    """

    num_stages: int
    num_microbatches: int
    rematerialize: Rematerialize = Rematerialize.ALWAYS
    schedule: str = "gpipe"
    stages_per_device: int = 1
    state_ratio: float = 1.0
    num_replicas: int = 1
    synchronize_batch_norm: bool = False

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return self.num_replicas * self.num_stages // self.stages_per_device

    @property
    def synchronizes(self) -> bool:
        """Whether statistics travel between replicas."""
        return self.synchronize_batch_norm and self.num_replicas > 1

    @cached_property
    def tasks(self) -> StepSchedule:
        """The ordered tasks of each device."""
        make = SCHEDULES[self.schedule]
        return make(self.num_stages, self.num_microbatches, self.rematerialize, self.stages_per_device)


@dataclass(frozen=True)
class StageForecast:
    """One stage; what it does is with one micro-batch.

    Attributes:
        first_layer: of its layers; the loss, which the last stage computes, is none.
        last_layer: of its layers.
        parameters: their number.
        flops: of a forward and a backward.
        forward_seconds: of a forward.
        recompute_seconds: of a recomputation.
        backward_seconds: of a backward.
        output_bytes: that travel to the next stage; as many gradients come back; 0 in the last stage.
        transfer_seconds: of these, one way.
    """

    first_layer: int
    last_layer: int
    parameters: int
    flops: int
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    output_bytes: int
    transfer_seconds: float

    def seconds(self, kind: Kind) -> float:
        """Return the seconds of a task."""
        found = {
            Kind.FORWARD: self.forward_seconds,
            Kind.RECOMPUTE: self.recompute_seconds,
            Kind.BACKWARD: self.backward_seconds,
        }
        return found[kind]


@dataclass(frozen=True)
class Forecast:
    """A training step of one pipeline.

    Attributes:
        stages: K of them.
        memory: of each device; stage s is on device s % P.
        timeline: the simulated tasks.
        averaging_seconds: of the gradients over the replicas, as if nothing of it overlapped with the tasks.
        update_seconds: of the optimiser, on the slowest device.
        utilization: FLOPs of the model, without recomputation, over what all devices could do meanwhile at their peak.
        tied_parameters: by how many the parameters of all stages exceed the model's: stages have copies of tied ones.
        auxiliary_parameters: how many of the model's only training uses.
    """

    stages: tuple[StageForecast, ...]
    memory: tuple[DeviceMemory, ...]
    timeline: Timeline
    averaging_seconds: float
    update_seconds: float
    utilization: float
    tied_parameters: int = 0
    auxiliary_parameters: int = 0

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, a tied one counted once."""
        return sum(stage.parameters for stage in self.stages) - self.tied_parameters

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the tasks, then the averaging, then the update."""
        return self.timeline.makespan_seconds + self.averaging_seconds + self.update_seconds

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest device."""
        return max(memory.peak_bytes for memory in self.memory)


def forecast(
    profiles: Sequence[LayerProfile],
    layer_seconds: Sequence[LayerSeconds],
    partitions: Sequence[int],
    setting: Setting,
    speed: Speed,
    layer_update_seconds: Sequence[float] | None = None,
) -> Forecast:
    """Say what a step takes.

    Args:
        profiles: of each layer and the loss, with the largest micro-batch.
        layer_seconds: likewise, planned (`Speed.seconds`) or measured.
        partitions: the number of layers of each stage.
        setting: how the model is run.
        speed: of a device, for transfers, the utilisation, and the update where that was not measured.
        layer_update_seconds: of the optimiser, measured, for each layer; None plans them.
    """
    bounds = list(pairwise(accumulate(partitions, initial=0)))
    stages = tuple(_stage(profiles, layer_seconds, first, end, speed) for first, end in bounds)

    def transfer_seconds(task: Task) -> float:
        """Outputs travel forward, the gradients of inputs back over the boundary before."""
        return stages[task.stage - (task.kind is Kind.BACKWARD)].transfer_seconds

    timeline = simulate(setting.tasks, lambda task: stages[task.stage].seconds(task.kind), transfer_seconds)
    memory = plan_memory(profiles, partitions, setting)
    if layer_update_seconds is None:
        update_seconds = speed.update_seconds(memory)
    else:
        updates = [sum(layer_update_seconds[first:end]) for first, end in bounds]
        update_seconds = max(sum(updates[device :: len(memory)]) for device in range(len(memory)))
    ends = speed.averaging_seconds(memory, setting.num_replicas), update_seconds
    flops = setting.num_microbatches * sum(stage.flops for stage in stages)
    possible = (timeline.makespan_seconds + sum(ends)) * len(memory) * speed.peak_flops_per_second
    tied = sum(profile.tied_parameters for profile in profiles)
    return Forecast(stages, memory, timeline, *ends, flops / possible, tied)


def plan_memory(
    profiles: Sequence[LayerProfile], partitions: Sequence[int], setting: Setting
) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device."""
    bounds = pairwise(accumulate(partitions, initial=0))
    stages = [stage_memory(profiles, first, end) for first, end in bounds]
    num_devices = len(setting.tasks)
    return tuple(
        plan_device({s: stages[s] for s in range(device, len(stages), num_devices)}, device, setting)
        for device in range(num_devices)
    )


def plan_device(stages: Mapping[int, StageMemory], device: int, setting: Setting) -> DeviceMemory:
    """Return the memory of one device, which has some stages."""
    return device_memory(
        setting.tasks[device],
        stages,
        setting.num_microbatches,
        setting.state_ratio,
        synchronizes=setting.synchronizes,
    )


def _stage(
    profiles: Sequence[LayerProfile], layer_seconds: Sequence[LayerSeconds], first: int, end: int, speed: Speed
) -> StageForecast:
    last_layer = end - 1
    is_last = end == len(profiles) - 1
    if is_last:
        end += 1  # the loss
    own, seconds = profiles[first:end], layer_seconds[first:end]
    output_bytes = 0 if is_last else profiles[end].input_bytes
    return StageForecast(
        first_layer=first,
        last_layer=last_layer,
        parameters=sum(profile.parameters for profile in own),
        flops=sum(work.flops for profile in own for work in (*profile.forward, *profile.backward)),
        forward_seconds=sum(one.forward for one in seconds),
        recompute_seconds=sum(one.recompute for one in seconds),
        backward_seconds=sum(one.backward for one in seconds),
        output_bytes=output_bytes,
        transfer_seconds=output_bytes / speed.link_bytes_per_second,
    )
