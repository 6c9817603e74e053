"""The memory of an evaluation: forwards alone, and then the metrics where the logits are.

A device has the inputs of a micro-batch, of its whole mini-batch if it has the first stage, and what a forward takes
that keeps nothing. Gradients are gone. Micro-batches of an evaluation may be larger than those of a training step, and
their logits wider, for want of autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.planning.memory import stage_memory
from gpipe.planning.profile import LayerProfile
from gpipe.planning.step import Setting


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

    def plan(self, partitions: Sequence[int], setting: Setting) -> tuple[int, ...]:
        """Return the bytes that each device needs, with its weights, the state of the optimiser and the averages."""
        sizes = microbatch_sizes(self.batch_size, setting.num_microbatches)
        if sizes[0] not in self._profiles:
            self._profiles[sizes[0]] = self.profiler(sizes[0])
        held, peaks = [0] * len(setting.tasks), [0] * len(setting.tasks)
        for stage, (first, end) in enumerate(pairwise(accumulate(partitions, initial=0))):
            memory, device = stage_memory(self._profiles[sizes[0]], first, end), setting.placement[stage]
            held[device] += memory.parameter_bytes + int(memory.gradient_bytes * setting.kept_ratio)
            held[device] += memory.converted_bytes
            held[device] += memory.input_bytes * len(sizes) if stage == 0 else 0
            received = memory.input_bytes if stage > 0 else 0
            peaks[device] = max(peaks[device], received + memory.quiet_peak_bytes)
        return tuple(map(sum, zip(held, peaks, strict=True)))
