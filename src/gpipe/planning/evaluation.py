"""The memory of an evaluation: forwards alone, and then the metrics where the logits are.

A device has the inputs of a micro-batch, of its whole mini-batch if it has the first stage, and what a forward takes
that keeps nothing. Gradients are gone. Micro-batches of an evaluation may be larger than those of a training step, and
their logits wider, for want of autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.planning.memory import state_bytes
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Setting, place_memory


@dataclass
class EvaluationPlanner:
    """Plans the memory of evaluations of one model.

    Attributes:
        profiler: size of a micro-batch -> the profile of each layer in evaluation mode, and of the metrics as the loss;
            what it returns is kept.
        batch_size: examples of a mini-batch, of one replica.
    """

    profiler: Callable[[int], list[LayerProfile]]
    batch_size: int
    _profiles: dict[int, list[LayerProfile]] = field(default_factory=dict, init=False)

    def find_microbatch_size(self, setting: Setting) -> int:
        """Return how many examples the largest micro-batch has."""
        return microbatch_sizes(self.batch_size, setting.num_microbatches)[0]

    def plan(self, partitions: Sequence[int], setting: Setting) -> tuple[int, ...]:
        """Return the bytes that each device needs, with its weights, the state of the optimiser and the averages."""
        sizes = microbatch_sizes(self.batch_size, setting.num_microbatches)
        if sizes[0] not in self._profiles:
            self._profiles[sizes[0]] = self.profiler(sizes[0])
        found = []
        for stages in place_memory(self._profiles[sizes[0]], partitions, setting):
            held = state_bytes(stages.values(), setting.ratios)
            held += sum(memory.converted_bytes for memory in stages.values())
            held += stages[0].input_bytes * len(sizes) if 0 in stages else 0
            received = (memory.input_bytes * (stage > 0) + memory.quiet_peak_bytes for stage, memory in stages.items())
            found.append(held + max(received))
        return tuple(found)
