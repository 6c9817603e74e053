"""How long a device takes for a layer, planned from its figures (the roofline)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from gpipe.planning.accelerator import Device
from gpipe.planning.ledger import Work
from gpipe.planning.memory import DeviceMemory
from gpipe.planning.profile import LayerProfile


class LayerSeconds(NamedTuple):
    """How long one layer, or the loss, takes for a micro-batch: forward, recomputed, and backward."""

    forward: float
    recompute: float
    backward: float


@dataclass(frozen=True)
class Speed:
    """What a device does in a second.

    Attributes:
        peak_flops_per_second: of its arithmetic, at the precision of the run.
        flops_per_second: that products reach.
        bytes_per_second: that operations reach between arithmetic and memory.
        link_bytes_per_second: to a neighbouring device, one way.
    """

    peak_flops_per_second: float
    flops_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float

    @classmethod
    def of(cls, device: Device, precision: str, efficiency: float) -> Speed:
        """Take a device to reach a share `efficiency` of its peaks, at "float32" or "bfloat16"."""
        peak = device.flops_per_second(precision)
        return cls(peak, efficiency * peak, efficiency * device.memory_bandwidth, device.link_bandwidth)

    def slowed(self, factor: float) -> Speed:
        """Return the speed of a device that takes `factor` times as long for everything, transfers too."""
        return Speed(*(value / factor for value in astuple(self)))

    def seconds(self, profiles: Sequence[LayerProfile]) -> list[LayerSeconds]:
        """Return how long each layer takes if nothing but its operations does, one after the other.

        Each is bound by arithmetic or by memory, whichever takes longer; a compiler that fuses them does better.
        """
        known: dict[int, LayerSeconds] = {}  # equal layers share their profile
        for profile in profiles:
            if id(profile) not in known:
                forward, backward = self._work(profile.forward), self._work(profile.backward)
                known[id(profile)] = LayerSeconds(forward, forward, backward)
        return [known[id(profile)] for profile in profiles]

    def averaging_seconds(self, memory: Sequence[DeviceMemory], num_replicas: int) -> float:
        """Return how long the slowest device's gradients take around a ring of its replicas."""
        gradients = max(device.gradient_bytes for device in memory)
        return 2 * (num_replicas - 1) / num_replicas * gradients / self.link_bytes_per_second

    def update_seconds(self, memory: Sequence[DeviceMemory]) -> float:
        """Return how long the optimiser takes: it reads and writes all that belongs to parameters."""
        return 2 * max(device.parameter_bytes for device in memory) / self.bytes_per_second

    def _work(self, operations: Iterable[Work]) -> float:
        flops, moved = self.flops_per_second, self.bytes_per_second
        return sum(max(one.flops / flops, one.bytes_moved / moved) for one in operations)
