"""The memory of a step on each device: parameters, boundary inputs, graphs, and the peaks of computing.

A device walks through its tasks. Between two tasks it holds, for each of its stages,

    weights, buffers, optimiser state      always
    low-precision copies of weights        throughout the step, if autocast makes them
    gradients                              from the first backward on; deferred ones, from its second task on
    the boundary inputs (stash)            of each micro-batch between its forward and its backward
    the graph                              of micro-batches that were kept, or have just been recomputed
    what deferred gradients need           between the two parts of a split backward

and during a task what the profiles of its layers say. Everything here is a sum over the layers of a partition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.pipeline.schedule import Kind, Task
from gpipe.pipeline.shared.averaging import BUCKET_BYTES
from gpipe.pipeline.shared.sharded_optimizer import share_out
from gpipe.planning.profile import LayerProfile


class StageMemory(NamedTuple):
    """What one stage holds; the peaks of its tasks are above what it held before, without its input.

    Those up to `bucket_bytes` depend on the tasks (`_PER_STAGE`).

    Attributes:
        input_bytes: of one micro-batch's boundary input.
        kept_bytes: of one micro-batch's graph.
        statistics_bytes: what its batch norms note per micro-batch until the step ends.
        deferred_bytes: what a split backward holds until it makes the gradients of weights.
        prompt_gradient_bytes: of the gradients of trainable weights that are never deferred.
        deferred_gradient_bytes: of those that a split backward makes later.
        quiet_peak_bytes: of a forward whose graph keeps no tensors.
        forward_peak_bytes: of a forward with a graph, or a recomputation.
        backward_peak_bytes: of a backward when all gradients exist already; they are not counted.
        first_backward_peak_bytes: of the first backward of a step, which makes the gradients; these are counted.
        split_peak_bytes: of a backward that defers them.
        first_split_peak_bytes: of the first such backward of a step, with the gradients that it makes.
        weights_peak_bytes: of making the deferred gradients, above what was held.
        first_weights_peak_bytes: likewise for the first time in a step, with these gradients.
        bucket_bytes: of the gradients that are copied at once to be averaged over replicas.
        parameter_bytes: of weights and buffers.
        converted_bytes: of the copies of weights that autocast makes once per step.
        trainable_sizes: of each of its trainable parameters.
    """

    input_bytes: int
    kept_bytes: int
    statistics_bytes: int
    deferred_bytes: int
    prompt_gradient_bytes: int
    deferred_gradient_bytes: int
    quiet_peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    first_backward_peak_bytes: int
    split_peak_bytes: int
    first_split_peak_bytes: int
    weights_peak_bytes: int
    first_weights_peak_bytes: int
    bucket_bytes: int
    parameter_bytes: int
    converted_bytes: int
    trainable_sizes: tuple[int, ...] = ()

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients of trainable weights."""
        return self.prompt_gradient_bytes + self.deferred_gradient_bytes


_PER_STAGE = StageMemory._fields[: StageMemory._fields.index("bucket_bytes") + 1]


class StateRatios(NamedTuple):
    """Bytes per byte of trainable parameters.

    Attributes:
        kept: of optimiser state and averages.
        update: what an update allocates temporarily.
        largest: what it allocates on top, per byte of the largest parameter.
        shared: of optimiser state, per byte of the parameters that the replica updates.
        num_sharers: the number of replicas that split the updates of parameters.
    """

    kept: float
    update: float = 0.0
    largest: float = 0.0
    shared: float = 0.0
    num_sharers: int = 1


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that one device needs in a step, in bytes, in the replica that keeps most.

    Attributes:
        parameter_bytes: weights, buffers, gradients, optimiser state and averages: 12 per parameter for the paper's
            RMSProp in float32.
        gradient_bytes: the gradients among them.
        stash_bytes: the most boundary inputs at once.
        activation_bytes: the most of everything else at once: stash, graphs, memory of operations, copies of weights.
        converted_bytes: the copies of weights among them, which autocast makes once per step.
        peak_bytes: the most of all at once; below the sum if the peak comes before all gradients exist.
    """

    parameter_bytes: int
    gradient_bytes: int
    stash_bytes: int
    activation_bytes: int
    peak_bytes: int
    converted_bytes: int = 0


def stage_memory(profiles: Sequence[LayerProfile], first: int, end: int) -> StageMemory:
    """Add up the stage of layers first ... end - 1; `profiles` are of all layers, and the loss.

    The last stage computes the loss too.
    """
    if end == len(profiles) - 1:
        end += 1
    own = profiles[first:end]
    sizes = tuple(chain.from_iterable(profile.trainable_sizes for profile in own))
    freed = dict[int, int]()  # parts of the stage's input that the plain model frees, by layer; the stage holds them
    for received in own[0].inputs:
        if received.freed_by is not None:
            freed[received.freed_by] = freed.get(received.freed_by, 0) + received.size
    kept, quiet, forward, backward, first_backward = 0, 0, 0, 0, 0
    gradients = sum(profile.trainable_bytes for profile in own)
    later_gradients = gradients
    deferred = sum(profile.deferred_bytes for profile in own)
    deferred_gradients = sum(profile.waiting_bytes for profile in own)
    later_deferred, later_prompt_gradients = deferred, gradients - deferred_gradients
    split = first_split = 0
    # The gradients of the outputs are held until the stage's backward ends. The plain model also holds those of tensors
    # that earlier layers made, and the peaks of the layers between include them.
    arrivals = profiles[end].arrivals if end < len(profiles) else ()
    given = sum(arrival.size for arrival in arrivals)
    for offset, profile in enumerate(own):
        arrived = 0 if offset == 0 else profile.input_bytes
        quiet = max(quiet, arrived + profile.peaks.quiet)
        forward = max(forward, kept + profile.peaks.forward + freed.get(offset, 0))
        kept += profile.kept_bytes + freed.get(offset, 0)
        later_gradients -= profile.trainable_bytes
        peak, first_peak = profile.peaks.last_backward, profile.peaks.last_first_backward
        split_peak = profile.peaks.last_split_backward
        if first + offset < end - 1 or not arrivals:
            passing = sum(arrival.storage_size for arrival in arrivals if end + arrival.made_by < first + offset)
            peak, first_peak = profile.peaks.backward - passing, profile.peaks.first_backward - passing
            split_peak = profile.peaks.split_backward - passing
        backward = max(backward, kept + peak)
        later_deferred -= profile.deferred_bytes
        split = max(split, kept + split_peak + later_deferred)
        prompt_gradients = profile.trainable_bytes - profile.waiting_bytes
        later_prompt_gradients -= prompt_gradients
        held_later = kept + later_deferred + later_prompt_gradients
        first_split = max(first_split, held_later + split_peak + min(first_peak - peak, prompt_gradients))
        first_backward = max(first_backward, kept + first_peak + later_gradients)
    outputs = profiles[end].inputs if end < len(profiles) else ()
    # Outputs that this stage's graph does not keep are freed once they have been sent.
    kept -= sum(sent.size for sent in outputs if end + sent.made_by >= first and not sent.is_kept_before)
    weights_peak, first_weights_peak = _weights_peaks(own)
    return StageMemory(
        input_bytes=own[0].boundary_bytes,
        kept_bytes=kept,
        statistics_bytes=sum(profile.statistics_bytes for profile in own),
        deferred_bytes=deferred,
        prompt_gradient_bytes=gradients - deferred_gradients,
        deferred_gradient_bytes=deferred_gradients,
        quiet_peak_bytes=quiet,
        forward_peak_bytes=forward,
        backward_peak_bytes=given + backward,
        first_backward_peak_bytes=given + first_backward,
        split_peak_bytes=given + split,
        first_split_peak_bytes=given + first_split,
        weights_peak_bytes=weights_peak,
        first_weights_peak_bytes=first_weights_peak,
        bucket_bytes=min(gradients, max((BUCKET_BYTES, *sizes))),
        parameter_bytes=sum(profile.parameter_bytes + profile.buffer_bytes for profile in own),
        converted_bytes=sum(profile.converted_bytes for profile in own),
        trainable_sizes=sizes,
    )


def state_bytes(stages: Collection[StageMemory], ratios: StateRatios) -> int:
    """Return the bytes of a device's weights, optimiser state and averages."""
    kept = sum(stage.parameter_bytes + int(stage.gradient_bytes * ratios.kept) for stage in stages)
    return kept + int(ratios.shared * _find_updated_bytes(stages, ratios))


def _find_updated_bytes(stages: Collection[StageMemory], ratios: StateRatios) -> int:
    """Return the bytes of the parameters that a replica updates: the most of all replicas that split them."""
    if ratios.num_sharers == 1:
        return sum(stage.gradient_bytes for stage in stages)
    sizes = tuple(chain.from_iterable(stage.trainable_sizes for stage in stages))
    return _find_largest_share(sizes, ratios.num_sharers)


@lru_cache(maxsize=2**10)  # many cuts have the same stages
def _find_largest_share(sizes: tuple[int, ...], num_sharers: int) -> int:
    shares = [0] * num_sharers
    for size, owner in zip(sizes, share_out(sizes, num_sharers), strict=True):
        shares[owner] += size
    return max(shares)


def _weights_peaks(own: Sequence[LayerProfile]) -> tuple[int, int]:
    """Return the peak of making deferred gradients, last layers first, above what has been freed meanwhile.

    The first number is for parameters that already have gradients; the second for their first gradients, which stay.
    """
    stay = released = peak = first_peak = 0
    for profile in reversed(own):
        layers_peak, layers_first_peak = profile.weights_peaks
        peak, first_peak = max(peak, layers_peak - released), max(first_peak, stay + layers_first_peak - released)
        stay += profile.waiting_bytes
        released += profile.deferred_bytes
    return peak, first_peak


_INPUT, _KEPT, _STATISTICS, _DEFERRED, _PROMPT_GRADIENT, _DEFERRED_GRADIENT, *_ = range(len(_PER_STAGE))
_GRADIENTS = {  # which gradients a task makes
    Kind.BACKWARD: (_PROMPT_GRADIENT, _DEFERRED_GRADIENT),
    Kind.INPUT_GRADIENTS: (_PROMPT_GRADIENT,),
    Kind.WEIGHT_GRADIENTS: (_DEFERRED_GRADIENT,),
}
_PEAKS = {  # of tasks that make gradients, if the stage already has them
    Kind.BACKWARD: "backward_peak_bytes",
    Kind.INPUT_GRADIENTS: "split_peak_bytes",
    Kind.WEIGHT_GRADIENTS: "weights_peak_bytes",
}


@dataclass(frozen=True)
class Walk:
    """A device's walk through its tasks: what it holds at once.

    The walk is made once, and then costs one product per cut. Its matrices say how often each of `_PER_STAGE` counts,
    stage by stage, at each distinct moment: [moments, counts].

    Attributes:
        stages: of the device.
        stash: the boundary inputs that it holds at once.
        activations: likewise for everything that is not parameters.
        all: likewise including gradients.
    """

    stages: tuple[int, ...]
    stash: Tensor
    activations: Tensor
    all: Tensor

    @classmethod
    def of(
        cls, tasks: Sequence[Task], num_microbatches: int, *, synchronizes: bool = False, averages: bool = False
    ) -> Walk:
        """Walk through the tasks of one device.

        Args:
            tasks: in order.
            num_microbatches: M; the first stage holds the inputs of all throughout.
            synchronizes: whether statistics of batch norms over all replicas are kept for recomputations.
            averages: whether the last gradients of a stage are averaged over replicas.
        """
        ends = Kind.BACKWARD, Kind.WEIGHT_GRADIENTS
        last = {task.stage: row for row, task in enumerate(tasks) if task.kind in ends}
        stages = tuple(sorted({task.stage for task in tasks}))
        columns = {stage: place * len(_PER_STAGE) for place, stage in enumerate(stages)}
        recomputed = {(task.stage, task.micro_batch) for task in tasks if task.kind is Kind.RECOMPUTE}
        has_gradients: dict[int, set[int]] = {stage: set() for stage in stages}  # the kinds that it already has
        changes: list[tuple[int, int, int]] = []  # (row, column, amount), in what is held during each task
        peaks, peaks_with_gradients = [], []  # the columns of what each task needs on top
        for row, (kind, stage, micro_batch) in enumerate(tasks):
            column, after = columns[stage], row + 1
            keeps_graph = kind is Kind.RECOMPUTE or (stage, micro_batch) not in recomputed
            peak = with_gradients = _PEAKS.get(kind, "forward_peak_bytes" if keeps_graph else "quiet_peak_bytes")
            if kind is Kind.FORWARD:
                changes += [(row, column + _INPUT, stage > 0), (after, column + _KEPT, keeps_graph)]
                # The statistics outlive a dropped graph; twice, if the recomputation needs those of all replicas.
                changes.append((after, column + _STATISTICS, 1 + (synchronizes and not keeps_graph)))
            elif kind is Kind.RECOMPUTE:
                changes += [(after, column + _KEPT, 1), (after, column + _STATISTICS, -synchronizes)]
            elif kind is Kind.WEIGHT_GRADIENTS:
                changes.append((after, column + _DEFERRED, -1))
            else:
                changes += [(row, column + _KEPT, -1), (after, column + _INPUT, -(stage > 0))]
                if kind is Kind.INPUT_GRADIENTS:
                    changes.append((after, column + _DEFERRED, 1))
            made = set(_GRADIENTS.get(kind, ())) - has_gradients[stage]
            if made:
                with_gradients = f"first_{peak}"
                changes += [(after, column + gradient, 1) for gradient in made]
                has_gradients[stage] |= made
            if averages and last[stage] == row:
                bucket = column + _PER_STAGE.index("bucket_bytes")
                changes += [(row, bucket, 1), (after, bucket, -1)]
            peaks.append(column + _PER_STAGE.index(peak))
            peaks_with_gradients.append(column + _PER_STAGE.index(with_gradients))
        held = torch.zeros(len(tasks) + 1, len(stages) * len(_PER_STAGE), dtype=torch.int32)
        if stages[0] == 0:
            held[0, _INPUT] = num_microbatches
        rows, at, amounts = zip(*changes, strict=True)
        indices = torch.tensor(rows), torch.tensor(at)
        held.index_put_(indices, torch.tensor(amounts, dtype=torch.int32), accumulate=True)
        held = held.cumsum(0, dtype=torch.int32)[:-1]
        columns_of_peaks = torch.tensor([peaks, peaks_with_gradients], dtype=torch.int32).T
        moments = torch.cat([held, columns_of_peaks], 1).unique(dim=0)  # most are equal
        held, (at, at_with_gradients) = moments[:, :-2], moments[:, -2:].T.long()
        numbers, one = torch.arange(len(moments)), torch.ones((), dtype=torch.int32)
        everything = held.index_put((numbers, at_with_gradients), one)
        activations = held.index_put((numbers, at), one)
        for gradient in _GRADIENTS[Kind.BACKWARD]:
            activations[:, gradient :: len(_PER_STAGE)] = 0
        stash = torch.zeros_like(held)
        stash[:, _INPUT :: len(_PER_STAGE)] = held[:, _INPUT :: len(_PER_STAGE)]
        return cls(stages, *(rows.double() for rows in (stash, activations, everything)))

    def measure(self, stages: Mapping[int, StageMemory], ratios: StateRatios) -> DeviceMemory:
        """Return the most that a device with these tasks needs."""
        # Whole numbers below 2**53 are exact.
        sizes = torch.tensor(
            [size for stage in self.stages for size in stages[stage][: len(_PER_STAGE)]], dtype=torch.float64
        )
        fixed = state_bytes(stages.values(), ratios)
        gradients = sum(stage.gradient_bytes for stage in stages.values())
        converted = sum(stage.converted_bytes for stage in stages.values())
        largest = max(max(stage.trainable_sizes, default=0) for stage in stages.values())
        stash, activations, most = (
            int((counts @ sizes).max().item()) for counts in (self.stash, self.activations, self.all)
        )
        updated = int(ratios.update * _find_updated_bytes(stages.values(), ratios) + ratios.largest * largest)
        if ratios.num_sharers > 1:  # two buckets of parameters are in transit at once
            updated = max(updated, min(gradients, 2 * max(stage.bucket_bytes for stage in stages.values())))
        return DeviceMemory(
            parameter_bytes=fixed + gradients,
            gradient_bytes=gradients,
            stash_bytes=stash,
            activation_bytes=converted + activations,
            peak_bytes=fixed + max(converted + most, gradients + updated),  # no activations exist during an update
            converted_bytes=converted,
        )
