"""The memory of a step on each device: parameters, boundary inputs, graphs, and the peaks of computing.

A device walks through its tasks; between two of them it holds, of each of its stages,

    weights, buffers, optimiser state      always
    gradients                              from the first backward on, or the first gradients of weights
    the boundary inputs (stash)            of each micro-batch between its forward and its backward
    the graph                              of those that were kept, or are just recomputed
    what gradients of weights wait with    between the two parts of a split backward

and during a task what the profiles of its layers say. Everything here is a sum over the layers of a partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe.pipeline.schedule import Kind, Task
from gpipe.pipeline.shared.averaging import BUCKET_BYTES
from gpipe.pipeline.split_backward import CACHE_BYTES
from gpipe.planning.profile import LayerProfile


@dataclass(frozen=True)
class StageMemory:
    """What one stage holds; the peaks of its tasks are above what it held before, its input not counted.

    Attributes:
        parameter_bytes: of weights and buffers.
        gradient_bytes: of the gradients of the trainable ones.
        statistics_bytes: what its batch norms note of each micro-batch until the step ends.
        input_bytes: of one micro-batch's boundary input.
        kept_bytes: of one micro-batch's graph.
        quiet_peak_bytes: of a forward whose graph keeps no tensors.
        forward_peak_bytes: of a forward with a graph, or a recomputation.
        backward_peak_bytes: of a backward, with all gradients there already; they are not counted.
        first_backward_peak_bytes: of the first backward of a step, which makes the gradients; these are counted.
        deferred_bytes: what a split backward holds until it makes the gradients of weights.
        split_peak_bytes: of a backward that leaves them for later.
        weights_peak_bytes: of making them, above what was held.
        bucket_bytes: of the gradients that are copied at once to be averaged over replicas.
    """

    parameter_bytes: int
    gradient_bytes: int
    statistics_bytes: int
    input_bytes: int
    kept_bytes: int
    quiet_peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    first_backward_peak_bytes: int
    deferred_bytes: int
    split_peak_bytes: int
    weights_peak_bytes: int
    bucket_bytes: int = 0


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that one device needs in a step, in bytes.

    Attributes:
        parameter_bytes: weights, buffers, gradients, optimiser state and averages: 12 per parameter for the paper's
            RMSProp in float32.
        gradient_bytes: those of them that are gradients.
        stash_bytes: the most boundary inputs at once.
        activation_bytes: the most of everything that is not parameters: stash, graphs, what computing takes.
        peak_bytes: the most at once of all; below the sum where the peak comes before all gradients are there.
    """

    parameter_bytes: int
    gradient_bytes: int
    stash_bytes: int
    activation_bytes: int
    peak_bytes: int


def stage_memory(profiles: Sequence[LayerProfile], first: int, end: int) -> StageMemory:
    """Add up the stage of layers first ... end - 1; `profiles` are of all layers, and the loss.

    The last stage computes the loss too.
    """
    if end == len(profiles) - 1:
        end += 1
    own = profiles[first:end]
    freed = dict[int, int]()  # what the plain model frees of the stage's input, by layer; the stage holds it
    for received in own[0].inputs:
        if received.freed_by is not None:
            freed[received.freed_by] = freed.get(received.freed_by, 0) + received.size
    kept, quiet, forward, backward, first_backward = 0, 0, 0, 0, 0
    gradients = sum(profile.trainable_bytes for profile in own)
    later_gradients = gradients
    deferred = sum(profile.deferred_bytes for profile in own)
    later_deferred, split = deferred, 0
    for offset, profile in enumerate(own):
        arrived = 0 if offset == 0 else profile.input_bytes
        quiet = max(quiet, arrived + profile.quiet_peak_bytes)
        forward = max(forward, kept + profile.forward_peak_bytes + freed.get(offset, 0))
        kept += profile.kept_bytes + freed.get(offset, 0)
        later_gradients -= profile.trainable_bytes
        backward = max(backward, kept + profile.backward_peak_bytes)
        later_deferred -= profile.deferred_bytes
        split = max(split, kept + profile.backward_peak_bytes + later_deferred)
        first_backward = max(first_backward, kept + profile.first_backward_peak_bytes + later_gradients)
    outputs = profiles[end].inputs if end < len(profiles) else ()
    # The gradients of the outputs are held until the stage's backward ends; in the plain model they are gone earlier.
    given = profiles[end].input_bytes if end < len(profiles) else 0
    # Outputs that this stage's graph does not keep are gone when they have been sent.
    kept -= sum(sent.size for sent in outputs if end + sent.made_by >= first and not sent.is_kept_before)
    return StageMemory(
        parameter_bytes=sum(profile.parameter_bytes + profile.buffer_bytes for profile in own),
        gradient_bytes=gradients,
        statistics_bytes=sum(profile.statistics_bytes for profile in own),
        input_bytes=own[0].input_bytes,
        kept_bytes=kept,
        quiet_peak_bytes=quiet,
        forward_peak_bytes=forward,
        backward_peak_bytes=given + backward,
        first_backward_peak_bytes=given + first_backward,
        deferred_bytes=deferred,
        split_peak_bytes=given + split,
        weights_peak_bytes=_weights_peak(own),
        bucket_bytes=min(gradients, max(BUCKET_BYTES, *(profile.largest_gradient_bytes for profile in own))),
    )


def _weights_peak(own: Sequence[LayerProfile]) -> int:
    """Return the most by which gradients of weights exceed what has been let go of meanwhile, last layers first."""
    made = released = peak = 0
    for profile in reversed(own):
        for size in profile.gradient_sizes:
            made += size
            peak = max(peak, made - released)
            made = 0 if made > CACHE_BYTES else made
        released += profile.deferred_bytes
    return peak


def device_memory(
    tasks: Sequence[Task],
    stages: Mapping[int, StageMemory],
    num_microbatches: int,
    state_ratio: float,
    *,
    synchronizes: bool = False,
    averages: bool = False,
) -> DeviceMemory:
    """Walk through the tasks of one device and return what it needs at most.

    Args:
        tasks: in order.
        stages: those of the device, by index.
        num_microbatches: M, of which the first stage holds all inputs throughout.
        state_ratio: bytes of optimiser state and averages per byte of trainable parameters.
        synchronizes: whether statistics of batch norms over all replicas are kept for recomputations.
        averages: whether the last gradients of a stage are averaged over replicas.
    """
    last = {task.stage: task for task in tasks if task.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS)}
    recomputed = {(task.stage, task.micro_batch) for task in tasks if task.kind is Kind.RECOMPUTE}
    # Between two tasks; parameters are not counted. The first stage holds the inputs of the whole mini-batch.
    stash = stages[0].input_bytes * num_microbatches if 0 in stages else 0
    graphs = gradients = most_stash = most_activations = most = 0
    begun: set[int] = set()
    for task in tasks:
        stage = stages[task.stage]
        received = stage.input_bytes if task.stage > 0 else 0
        combined = stage.statistics_bytes if synchronizes else 0  # a recomputed graph keeps them too
        keeps_graph = task.kind is Kind.RECOMPUTE or (task.stage, task.micro_batch) not in recomputed
        if task.kind is Kind.WEIGHT_GRADIENTS:
            peak = with_gradients = stage.weights_peak_bytes
        elif task.kind.makes_gradients:
            graphs -= stage.kept_bytes
            peak = with_gradients = stage.backward_peak_bytes
            if task.kind is Kind.INPUT_GRADIENTS:
                peak = with_gradients = stage.split_peak_bytes
            elif task.stage not in begun:
                with_gradients = stage.first_backward_peak_bytes
        else:
            stash += received if task.kind is Kind.FORWARD else 0
            peak = with_gradients = stage.forward_peak_bytes if keeps_graph else stage.quiet_peak_bytes
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
        if task.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENTS):
            gradients += stage.gradient_bytes if task.stage not in begun else 0
            begun.add(task.stage)
    fixed = sum(stage.parameter_bytes + int(stage.gradient_bytes * state_ratio) for stage in stages.values())
    return DeviceMemory(
        parameter_bytes=fixed + gradients,
        gradient_bytes=gradients,
        stash_bytes=most_stash,
        activation_bytes=most_activations,
        peak_bytes=fixed + max(most, gradients),  # the update: all gradients, no activations
    )
