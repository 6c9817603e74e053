"""One model on devices of one kind: what a step takes, what would fit instead, and what is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpipe.pipeline.microbatch import microbatch_sizes
from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.device import GIB, Device
from gpipe.planning.forecast import Forecast, Setting, forecast, plan_memory
from gpipe.planning.profile import LayerProfile
from gpipe.planning.speed import Speed

Profiler = Callable[[int], list[LayerProfile]]
"""Size of a micro-batch -> the profile of each layer and the loss."""
Cut = Callable[[Sequence[LayerProfile], Setting], list[int]]
"""(profiles, setting) -> the number of layers of each stage."""


@dataclass
class Planner:
    """Plans steps of one model with one mini-batch.

    Attributes:
        profiler: describes the model; what it returns is kept.
        cut: chooses the partitions.
        batch_size: N, examples of a mini-batch, of all replicas.
        device: that every stage gets.
        speed: that the device reaches.
    """

    profiler: Profiler
    cut: Cut
    batch_size: int
    device: Device
    speed: Speed
    _profiles: dict[int, list[LayerProfile]] = field(default_factory=dict)

    def profiles(self, num_microbatches: int, num_replicas: int = 1) -> list[LayerProfile]:
        """Return the profiles with the largest of M micro-batches."""
        size = max(microbatch_sizes(self.batch_size // num_replicas, num_microbatches))
        if size not in self._profiles:
            self._profiles[size] = self.profiler(size)
        return self._profiles[size]

    def partitions(self, setting: Setting, num_replicas: int = 1) -> list[int]:
        """Return the number of layers of each stage. Raises ValueError where the model cannot be cut so."""
        return self.cut(self.profiles(setting.num_microbatches, num_replicas), setting)

    def forecast(self, setting: Setting, num_replicas: int = 1) -> Forecast:
        """Say what a step takes. Raises ValueError where the model cannot be cut so."""
        profiles = self.profiles(setting.num_microbatches, num_replicas)
        partitions = self.cut(profiles, setting)
        return forecast(profiles, self.speed.seconds(profiles), partitions, setting, self.speed)

    def peak_bytes(self, setting: Setting, num_replicas: int = 1) -> int:
        """Return the memory of the fullest device. Raises ValueError where the model cannot be cut so."""
        profiles = self.profiles(setting.num_microbatches, num_replicas)
        return max(memory.peak_bytes for memory in plan_memory(profiles, self.cut(profiles, setting), setting))

    def fits(self, setting: Setting, num_replicas: int = 1) -> bool:
        """Return whether each device has room for what it needs."""
        return self.peak_bytes(setting, num_replicas) <= self.device.memory_bytes

    def verdict(self, setting: Setting, found: Forecast) -> str:
        """Say whether a setting fits, and what would where it does not."""
        room = self.device.memory_bytes
        fullest = max(range(len(found.memory)), key=lambda device: found.memory[device].peak_bytes)
        needs = found.memory[fullest].peak_bytes
        what = "stage" if setting.stages_per_device == 1 else "device"
        if needs <= room:
            return f"fits: {what} {fullest} needs the most, {_gb(needs)} of {_gb(room)}"
        others = ", or ".join(self._remedies(setting)) or "no other number of stages or micro-batches"
        return f"does not fit: {what} {fullest} needs {_gb(needs)} of {_gb(room)}; {others} fits"

    def _remedies(self, setting: Setting) -> Iterator[str]:
        """Yield the smallest change of K that fits, and that of M."""
        step = setting.stages_per_device
        num_layers = len(self.profiles(setting.num_microbatches)) - 1
        candidates = range(setting.num_stages + step, num_layers + 1, step)
        for change, name, values in (
            ("num_stages", "K", candidates),
            ("num_microbatches", "M", _doubled(setting.num_microbatches, self.batch_size)),
        ):
            fitting = (value for value in values if self.fits(replace(setting, **{change: value})))
            if (value := next(fitting, None)) is not None:
                yield f"{name} = {value}"

    def fastest(self, num_devices: int, setting: Setting) -> tuple[Setting, int, Forecast] | None:
        """Return the setting with most examples a second on some devices, the replicas, and the forecast.

        Tried are the divisors of the number of devices as K, each with as many replicas as there are devices for, all
        modes of re-materialisation, and M = 1, 2, 4, ...; the schedule stays. None where nothing fits.
        """
        best: tuple[Setting, int, Forecast] | None = None
        for candidate, num_replicas in self._candidates(num_devices, setting):
            if self.fits(candidate, num_replicas):
                found = self.forecast(candidate, num_replicas)
                seconds = found.step_seconds + self.averaging_seconds(found, num_replicas)
                if best is None or seconds < best[2].step_seconds + self.averaging_seconds(best[2], best[1]):
                    best = candidate, num_replicas, found
        return best

    def averaging_seconds(self, found: Forecast, num_replicas: int) -> float:
        """Return the seconds of averaging float32 gradients over replicas in a ring, as if nothing overlapped."""
        gradients = 4 * max(stage.parameters for stage in found.stages)
        return 2 * (num_replicas - 1) / num_replicas * gradients / self.speed.link_bytes_per_second

    def _candidates(self, num_devices: int, setting: Setting) -> Iterator[tuple[Setting, int]]:
        for devices in (n for n in range(1, num_devices + 1) if num_devices % n == 0):
            num_replicas, num_stages = num_devices // devices, devices * setting.stages_per_device
            if self.batch_size % num_replicas or (devices == 1 and setting.stages_per_device > 1):
                continue
            size = self.batch_size // num_replicas
            for num_microbatches in _doubled(1, size, include_first=True):
                if num_stages > len(self.profiles(num_microbatches, num_replicas)) - 1:
                    break
                for mode in Rematerialize:
                    yield (
                        replace(
                            setting, num_stages=num_stages, num_microbatches=num_microbatches, rematerialize=mode
                        ),
                        num_replicas,
                    )


def largest(fits: Callable[[int], bool], start: int, step: int) -> int:
    """Return the largest of start, start + step, ... that fits, taken to be all up to some size; 0 where none does.

    Args:
        fits: whether a size does.
        start: the smallest size.
        step: between sizes.
    """
    if not fits(start):
        return 0
    reach = 1
    while fits(start + reach * step):
        reach *= 2
    good, bad = reach // 2, reach
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(start + middle * step) else (good, middle)
    return start + good * step


def _doubled(value: int, most: int, *, include_first: bool = False) -> Iterator[int]:
    """Yield the doubles of a number up to another one, which comes last."""
    if include_first:
        yield min(value, most)
    while value < most:
        value = min(2 * value, most)
        yield value


def _gb(size: int) -> str:
    return f"{size / GIB:.{1 if size < 100 * GIB else 0}f} GiB"
