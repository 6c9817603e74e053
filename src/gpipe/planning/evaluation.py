"""The memory of an evaluation: forwards alone, and then the metrics where the logits are.

A device has the inputs of a micro-batch, of its whole mini-batch if it has the first stage, and what a forward takes
that keeps nothing. Gradients are gone. Micro-batches of an evaluation may be larger than those of a training step, and
their logits wider, for want of autocast.
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
    """What a mini-batch of an evaluation takes.

    Attributes:
        profiles: of each layer in evaluation mode, and of the metrics as the loss, with the largest micro-batch.
        num_microbatches: of which the first stage holds all inputs.
    """

    profiles: list[LayerProfile]
    num_microbatches: int

    def measure(self, stages: Mapping[int, StageMemory], ratios: StateRatios) -> int:
        """Return the bytes that a device needs, with its weights, the state of the optimiser and the averages.

        Args:
            stages: those of the device, by index, of these profiles.
            ratios: of what belongs to parameters.
        """
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
        batch_size: examples of a mini-batch, of one replica.
    """

    profiler: Callable[[int], list[LayerProfile]]
    batch_size: int

    def find_microbatch_size(self, setting: Setting) -> int:
        """Return how many examples the largest micro-batch has."""
        return microbatch_sizes(self.batch_size, setting.num_microbatches)[0]

    def describe(self, setting: Setting) -> Evaluation:
        """Return what an evaluation of a run takes."""
        sizes = microbatch_sizes(self.batch_size, setting.num_microbatches)
        return Evaluation(self.profiler(sizes[0]), len(sizes))
