"""What a walk remembers of a device's tasks says what going through them says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.schedule import Kind, Rematerialize, Task
from gpipe.pipeline.schedules.choice import SCHEDULES
from gpipe.planning.memory import DeviceMemory, StageMemory, StateRatios, Walk

STAGES_PER_DEVICE = {"interleaved_1f1b": 3, "zb_v": 2}


@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.data(),
    st.booleans(),
    st.booleans(),
    st.floats(0, 3),
)
def test_a_walk_says_what_going_through_the_tasks_says(
    schedule: str,
    num_devices: int,
    num_microbatches: int,
    data: st.DataObject,
    synchronizes: bool,
    averages: bool,
    ratio: float,
) -> None:
    per_device = STAGES_PER_DEVICE.get(schedule, 1)
    num_stages = num_devices * per_device
    mode = data.draw(st.sampled_from(Rematerialize) | st.tuples(*[st.integers(0, 4)] * num_stages))
    sizes = st.tuples(*[st.integers(0, 10**12)] * (len(StageMemory._fields) - 1))  # and those of single parameters
    stages = {stage: StageMemory(*data.draw(sizes)) for stage in range(num_stages)}
    for tasks in SCHEDULES[schedule](num_stages, num_microbatches, mode, per_device):
        own = {stage: stages[stage] for stage in {task.stage for task in tasks}}
        flags = {"synchronizes": synchronizes, "averages": averages}
        walk = Walk.of(tasks, num_microbatches, **flags)
        assert walk.measure(own, StateRatios(ratio)) == device_memory(tasks, own, num_microbatches, ratio, **flags)


MAKES = {
    Kind.BACKWARD: {"prompt", "deferred"},
    Kind.INPUT_GRADIENTS: {"prompt"},
    Kind.WEIGHT_GRADIENTS: {"deferred"},
}


def peaks(kind: Kind, stage: StageMemory, *, keeps_graph: bool, is_first: bool) -> tuple[int, int]:
    """Return the peak of a task where all gradients are there already, and with those that it makes."""
    if kind is Kind.BACKWARD:
        every, first = stage.backward_peak_bytes, stage.first_backward_peak_bytes
    elif kind is Kind.INPUT_GRADIENTS:
        every, first = stage.split_peak_bytes, stage.first_split_peak_bytes
    elif kind is Kind.WEIGHT_GRADIENTS:
        every, first = stage.weights_peak_bytes, stage.first_weights_peak_bytes
    else:
        every = first = stage.forward_peak_bytes if keeps_graph else stage.quiet_peak_bytes
    return every, first if is_first else every


def device_memory(
    tasks: Sequence[Task],
    stages: Mapping[int, StageMemory],
    num_microbatches: int,
    state_ratio: float,
    *,
    synchronizes: bool = False,
    averages: bool = False,
) -> DeviceMemory:
    """Walk through the tasks of one device, one after the other, adding up what it holds."""
    last = {task.stage: task for task in tasks if task.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS)}
    recomputed = {(task.stage, task.micro_batch) for task in tasks if task.kind is Kind.RECOMPUTE}
    # Between two tasks; parameters are not counted. The first stage holds the inputs of the whole mini-batch.
    stash = stages[0].input_bytes * num_microbatches if 0 in stages else 0
    graphs = gradients = most_stash = most_activations = most = 0
    made: dict[int, set[str]] = {stage: set() for stage in stages}
    for task in tasks:
        stage = stages[task.stage]
        received = stage.input_bytes if task.stage > 0 else 0
        combined = stage.statistics_bytes if synchronizes else 0  # a recomputed graph keeps them too
        keeps_graph = task.kind is Kind.RECOMPUTE or (task.stage, task.micro_batch) not in recomputed
        makes = MAKES.get(task.kind, set()) - made[task.stage]
        peak, with_gradients = peaks(task.kind, stage, keeps_graph=keeps_graph, is_first=bool(makes))
        graphs -= stage.kept_bytes if task.kind.makes_gradients else 0
        stash += received if task.kind is Kind.FORWARD else 0
        if averages and last[task.stage] == task:
            peak, with_gradients = peak + stage.bucket_bytes, with_gradients + stage.bucket_bytes
        most_stash = max(most_stash, stash)
        most_activations = max(most_activations, stash + graphs + peak)
        most = max(most, stash + graphs + with_gradients + gradients)
        if task.kind is Kind.FORWARD:
            graphs += stage.statistics_bytes + (stage.kept_bytes if keeps_graph else combined)
        elif task.kind is Kind.RECOMPUTE:
            graphs += stage.kept_bytes - combined
        elif task.kind is Kind.WEIGHT_GRADIENTS:
            graphs -= stage.deferred_bytes
        else:
            graphs += stage.deferred_bytes if task.kind is Kind.INPUT_GRADIENTS else 0
            stash -= received
        made[task.stage] |= makes
        gradients += sum(getattr(stage, f"{name}_gradient_bytes") for name in makes)
    fixed = sum(stage.parameter_bytes + int(stage.gradient_bytes * state_ratio) for stage in stages.values())
    converted = sum(stage.converted_bytes for stage in stages.values())
    return DeviceMemory(
        parameter_bytes=fixed + gradients,
        gradient_bytes=gradients,
        stash_bytes=most_stash,
        activation_bytes=converted + most_activations,
        peak_bytes=fixed + max(converted + most, gradients),  # the update: all gradients, no activations
        converted_bytes=converted,
    )
