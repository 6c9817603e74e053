"""The memory of an evaluation: only forwards, then the metrics, where the logits are.

A device holds the inputs of a micro-batch, or of the whole mini-batch if it has the first stage, and what a forward
needs that keeps nothing. There are no gradients. An evaluation's micro-batches may be larger than those of a training
step, and their logits wider, if it runs without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.planning.memory import StageMemory, StateRatios, state_bytes
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Setting, place_memory


class Evaluation(NamedTuple):
    """What determines the memory of an evaluation's mini-batch.

    Attributes:
        profiles: of each layer in evaluation mode, and of the metrics as the loss, with the largest micro-batch.
        num_microbatches: their number; the first stage holds the inputs of all.
    """

    profiles: list[LayerProfile]
    num_microbatches: int

    def measure(self, stages: Mapping[int, StageMemory], ratios: StateRatios) -> int:
        """Return the bytes that a device needs, including weights, optimiser state and averages."""
        held = state_bytes(stages.values(), ratios)
        held += sum(memory.converted_bytes for memory in stages.values())
        held += stages[0].input_bytes * self.num_microbatches if 0 in stages else 0
        received = (memory.input_bytes * (stage > 0) + memory.quiet_peak_bytes for stage, memory in stages.items())
        return held + max(received)

    def plan(self, partitions: Sequence[int], setting: Setting) -> tuple[int, ...]:
        """Return the bytes that each device needs."""
        devices = place_memory(self.profiles, partitions, setting)
        return tuple(self.measure(stages, setting.ratios) for stages in devices)


@dataclass(frozen=True)
class EvaluationPlanner:
    """Plans the memory of evaluations of one model.

    Attributes:
        profiler: size of a micro-batch -> the profile of each layer in evaluation mode, and of the metrics as the loss.
        batch_size: the examples of one replica's mini-batch.
    """

    profiler: Callable[[int], list[LayerProfile]]
    batch_size: int

    def find_microbatch_size(self, setting: Setting) -> int:
        """Return the size of the largest micro-batch."""
        return microbatch_sizes(self.batch_size, setting.num_microbatches)[0]

    def describe(self, setting: Setting) -> Evaluation:
        """Return what determines the memory of a run's evaluation."""
        sizes = microbatch_sizes(self.batch_size, setting.num_microbatches)
        return Evaluation(self.profiler(sizes[0]), len(sizes))
