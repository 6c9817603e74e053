"""Study a model of the paper's Tables 2 and 3 on K devices: which micro-batches fit, and how long a step takes.

The seconds of its layers are planned, from the maker's figures for the paper's device (the roofline), or measured on
this machine. In the second case the links are slower by the same factor as this machine is slower than the paper's
device, which keeps the ratio of transfer to computing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.table2_throughput.breakdown import break_down
from gpipe.planning.accelerator import Accelerator, LayerSeconds, Speed
from gpipe.planning.exact_cut import partition_layers
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.planning.step import Setting, plan_memory, plan_step
from gpipe.planning.timing import LayerTimer, LayerTiming
from gpipe.training.losses import ClassificationLoss

EFFICIENCY = 0.5  # of the peaks of the paper's devices; planned speed-ups hardly depend on it
LOSS = ClassificationLoss()


@dataclass
class TableModel:
    """One model.

    Attributes:
        title: in the tables.
        layers: on the meta device.
        example: (number of examples, device) -> inputs and targets.
        device: the paper's.
        batch_size: of the paper's Table 1. It is the mini-batch if all cells have the same, and the largest micro-batch
            if it is chosen to fit.
        sizes: of the micro-batches to time. Other sizes take as long per example as the next smaller one.
        fixed_size: of the micro-batches, if the mini-batch grows with M.
        timings: as measured, by size of the micro-batch.
    """

    title: str
    layers: nn.Sequential
    example: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    device: Accelerator
    batch_size: int
    sizes: tuple[int, ...]
    fixed_size: int = 4
    timings: Mapping[int, list[LayerTiming]] = field(default_factory=dict)
    _profiles: dict[int, list[LayerProfile]] = field(default_factory=dict)

    @property
    def planned_speed(self) -> Speed:
        """The assumed speed of the paper's device."""
        return Speed.of(self.device, "float32", EFFICIENCY)

    def measure(self, timer: LayerTimer, device: torch.device) -> None:
        """Time the layers."""
        self.timings = {size: timer.time(self.layers, LOSS, self.example(size, device)) for size in self.sizes}

    def profiles(self, size: int) -> list[LayerProfile]:
        """Return the profile of each layer and the loss with a micro-batch."""
        if size not in self._profiles:
            self._profiles[size] = profile_layers(self.layers, LOSS, self.example(size, torch.device("meta")))
        return self._profiles[size]

    def seconds(self, size: int, kind: str) -> list[LayerSeconds]:
        """Return the seconds of each layer and the loss with a micro-batch, for "planned" or "simulated" numbers."""
        if kind == "planned":
            return self.planned_speed.seconds(self.profiles(size))
        nearest = max((timed for timed in self.timings if timed <= size), default=min(self.timings))
        scale = size / nearest
        return [LayerSeconds(*(scale * value for value in timing.seconds)) for timing in self.timings[nearest]]

    def flops_per_second(self, kind: str) -> float:
        """Return the FLOP/s of a forward and a backward of the largest micro-batch that is timed."""
        size = max(self.sizes)
        flops = sum(work.flops for profile in self.profiles(size) for work in (*profile.forward, *profile.backward))
        return flops / sum(layer.forward + layer.backward for layer in self.seconds(size, kind))

    def speed(self, kind: str) -> Speed:
        """Return the speed of the paper's device, for a simulation slowed to that of this machine."""
        if kind == "planned":
            return self.planned_speed
        return slow_down(self.planned_speed, self.flops_per_second("planned") / self.flops_per_second("simulated"))

    def cut(self, size: int, num_stages: int, kind: str, by: str) -> list[int]:
        """Return the partitions by "seconds", with the smallest maximum, or by "flops", with the paper's rule.

        The paper's rule is the smallest variance of estimated costs (section 2.1).
        """
        if by == "seconds":
            costs = [sum(layer) for layer in self.seconds(size, kind)]
            return partition_layers([*costs[:-2], costs[-2] + costs[-1]], num_stages)
        flops = [sum(work.flops for work in profile.forward) for profile in self.profiles(size)]
        return partition_layers(flops[:-1], num_stages, objective="variance")

    def find_fitting_size(self, setting: Setting, kind: str, by: str) -> int:
        """Return the largest micro-batch that fits the device, a power of two up to batch_size; 1 if none does."""
        size = self.batch_size
        while size > 1 and self.peak_bytes(size, setting, kind, by) > self.device.memory_bytes:
            size //= 2
        return size

    def peak_bytes(self, size: int, setting: Setting, kind: str, by: str) -> int:
        """Return the planned memory of the fullest device, at 12 bytes per parameter."""
        partitions = self.cut(size, setting.num_stages, kind, by)
        return max(memory.peak_bytes for memory in plan_memory(self.profiles(size), partitions, setting))

    def cell(self, num_stages: int, num_microbatches: int, kind: str, batch: str, by: str) -> dict[str, Any]:
        """Return a cell of the grid.

        Args:
            num_stages: K.
            num_microbatches: M.
            kind: "planned" or "simulated".
            batch: how to choose micro-batches: "fits" the memory, "fixed", or "equal" mini-batches.
            by: what the partitions balance, "seconds" or "flops".
        """
        setting = Setting(num_stages, num_microbatches)
        if batch == "fits":
            size = self.find_fitting_size(setting, kind, by)
        else:
            size = self.fixed_size if batch == "fixed" else max(1, self.batch_size // num_microbatches)
        partitions = self.cut(size, num_stages, kind, by)
        updates = None if kind == "planned" else [timing.update for timing in self.timings[max(self.timings)]]
        seconds, speed = self.seconds(size, kind), self.speed(kind)
        found = plan_step(self.profiles(size), seconds, partitions, setting, speed, updates)
        stages = [stage.work.total for stage in found.stages]
        return {
            "num_stages": num_stages,
            "num_microbatches": num_microbatches,
            "batch": batch,
            "cut_by": by,
            "microbatch_size": size,
            "peak_bytes": found.peak_bytes,
            "partitions": partitions,
            "imbalance": max(stages) * num_stages / sum(stages) - 1,
            "step_seconds": found.step_seconds,
            "examples_per_second": size * num_microbatches / found.step_seconds,
            "shares": break_down(found)._asdict(),
        }


def slow_down(speed: Speed, factor: float) -> Speed:
    """Return the speed of an accelerator that takes `factor` times as long for everything, transfers too."""
    return replace(
        speed,
        peak_flops_per_second=speed.peak_flops_per_second / factor,
        flops_per_second=speed.flops_per_second / factor,
        bytes_per_second=speed.bytes_per_second / factor,
        link_bytes_per_second=speed.link_bytes_per_second / factor,
        operation_seconds=speed.operation_seconds * factor,
        hop_seconds=speed.hop_seconds * factor,
        task_seconds=speed.task_seconds * factor,
    )
