"""Accelerators to plan for, and how long one takes for a layer (the roofline).

Figures are the makers', for one device as a stage uses it; on a TPU that is a core, half a chip. Real hardware reaches
a fraction of these peaks: `efficiency`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from gpipe.pipeline.schedule import Kind
from gpipe.planning.ledger import Work
from gpipe.planning.profile import LayerProfile

GIB = 2**30
EFFICIENCY = 0.5  # assumed; well-tuned training reaches 0.3 to 0.6


@dataclass(frozen=True)
class Accelerator:
    """One accelerator.

    Attributes:
        name: as plan.py accepts it.
        memory_bytes: the size of its main memory.
        float32_flops: FLOP/s of products of float32 numbers as torch computes them (on a TPU as XLA does by default:
            inputs rounded to bfloat16).
        bfloat16_flops: FLOP/s of products under autocast to bfloat16; without such units, those of float32.
        float16_flops: likewise to float16.
        memory_bandwidth: bytes/s between its memory and its arithmetic units.
        link_bandwidth: bytes/s to a neighbouring accelerator, in one direction.
        operation_seconds: the time that any operation takes to start.
        starts_ahead: whether a host starts operations while earlier ones run; otherwise each start adds to the time.
        hop_seconds: the latency of a message to a neighbour, besides the time of its bytes; 0 if not measured.
        task_seconds: what the engine adds to a task; 0 if the host runs ahead of its device, or if not measured.
    """

    name: str
    memory_bytes: int
    float32_flops: float
    bfloat16_flops: float
    float16_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    operation_seconds: float
    starts_ahead: bool
    hop_seconds: float = 0.0
    task_seconds: float = 0.0

    def flops_per_second(self, precision: str) -> float:
        """Return the FLOP/s for "float32", "bfloat16" or "float16"; raise ValueError for another precision."""
        of = {"float32": self.float32_flops, "bfloat16": self.bfloat16_flops, "float16": self.float16_flops}
        if precision not in of:
            raise ValueError(f"precision is {precision!r}, expected one of {', '.join(of)}.")
        return of[precision]

    @property
    def is_gpu(self) -> bool:
        """Whether torch starts each of its operations from a host that runs ahead."""
        return self.starts_ahead and self.operation_seconds > 0

    @property
    def room_bytes(self) -> int:
        """The part of its memory that may be planned: planned and real peaks differ by up to a tenth."""
        return self.memory_bytes * 9 // 10

    def with_limits(self, *, memory_gib: float | None, link_gb_per_second: float | None) -> Accelerator:
        """Return the accelerator with the given figures in place of the maker's."""
        memory = self.memory_bytes if memory_gib is None else int(memory_gib * GIB)
        link = self.link_bandwidth if link_gb_per_second is None else link_gb_per_second * 1e9
        return replace(self, memory_bytes=memory, link_bandwidth=link)


# Splitting the backward of a product costs as much as starting this many operations: a hook, a second kernel, a second
# call of autograd. With the CPU's figure below this is what `experiments.split_cost` finds for AmoebaNet's small cells.
_STARTS_PER_SPLIT = 5
_T = 1e12
_G = 1e9

# TPUs: Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks" (CACM 2020), table 1; a link
# of 496 (v2) or 656 (v3) Gbit/s. GPUs: NVIDIA's data sheets, without sparsity. P40 and P100 sit in PCI-E slots of 16
# lanes of generation 3, and H100 PCIe in those of generation 5, which are four times as fast. Without NVLink a copy
# goes through the host, over two slots, so at half the 12 GB/s that one of generation 3 reaches.
# The CPU is nominal, so that every machine without a GPU makes the same plan: a laptop's memory; one core at 3 GHz with
# two fused multiply-adds of 8 floats per cycle (AVX2), 96 GFLOP/s, and no units for bfloat16; one channel of DDR4-2666,
# 21.3 GB/s; half of that for a message, which is copied into a socket and out of it; and 20 microseconds per operation.
# Without these, small layers of many operations, such as AmoebaNet's last cells, look much too cheap; they explain most
# of the measured times of the layers of amoebanet_imagenet_laptop and transformer_multilingual_laptop. Between tasks of
# two processes lies a millisecond, as `train_step(record_timeline=True)` shows: a message is packed, sent and unpacked,
# and a process has to wake up. A task takes a quarter of a millisecond besides its layers: it calls autograd, seeds
# generators and keeps buffers. On a CPU that slept while it waited it takes two or three times as long
# (`experiments.schedule_simulation`); a calibration measures it after layers that compute.
# Starting operations: XLA compiles what a TPU runs into one program, so starting takes no time. A GPU's operations are
# started by torch on its host: Python, the dispatcher, autograd, and NVIDIA's driver. Published estimates are 5 to 25
# microseconds per operation; we assume 10 on any host. The host runs ahead of a busy GPU, so a layer takes the GPU's
# time or the host's, whichever is longer: only small layers wait for the host.
_gpu = partial(Accelerator, operation_seconds=10e-6, starts_ahead=True)
_ALL = (
    Accelerator("tpu_v2", 8 * GIB, 23 * _T, 23 * _T, 23 * _T, 350 * _G, 62 * _G, 0.0, starts_ahead=True),
    Accelerator("tpu_v3", 16 * GIB, 61.5 * _T, 61.5 * _T, 61.5 * _T, 450 * _G, 82 * _G, 0.0, starts_ahead=True),
    _gpu("p40", 24 * GIB, 11.76 * _T, 11.76 * _T, 0.18 * _T, 346 * _G, 6 * _G),
    _gpu("p100", 16 * GIB, 9.3 * _T, 9.3 * _T, 18.7 * _T, 732 * _G, 6 * _G),
    _gpu("v100", 32 * GIB, 15.7 * _T, 15.7 * _T, 125 * _T, 900 * _G, 150 * _G),
    _gpu("a100_40gb", 40 * GIB, 19.5 * _T, 312 * _T, 312 * _T, 1555 * _G, 300 * _G),
    _gpu("a100", 80 * GIB, 19.5 * _T, 312 * _T, 312 * _T, 2039 * _G, 300 * _G),
    _gpu("h100_pcie", 80 * GIB, 51 * _T, 756 * _T, 756 * _T, 2000 * _G, 24 * _G),
    _gpu("h100", 80 * GIB, 67 * _T, 989 * _T, 989 * _T, 3350 * _G, 450 * _G),
    _gpu("h200", 141 * GIB, 67 * _T, 989 * _T, 989 * _T, 4800 * _G, 450 * _G),
    Accelerator(
        "cpu",
        16 * GIB,
        96 * _G,
        96 * _G,
        96 * _G,
        21.3 * _G,
        10.65 * _G,
        20e-6,
        starts_ahead=False,
        hop_seconds=1e-3,
        task_seconds=0.25e-3,
    ),
)
ACCELERATORS = {accelerator.name: accelerator for accelerator in _ALL}
_UNKNOWN_GPU = "a100"
# How drivers name variants, such as "NVIDIA A100-SXM4-40GB" and "NVIDIA H100 PCIe".
_VARIANTS = {"a100_40gb": r"\ba100\b.*\b40gb\b", "h100_pcie": r"\bh100\b.*\bpcie\b"}


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator called `name`.

    Raises:
        ValueError: there is none; the message lists those known.
    """
    if name not in ACCELERATORS:
        raise ValueError(
            f"device is {name}, expected auto or one of {', '.join(ACCELERATORS)}: set device=... to the nearest one, "
            "and its memory_gib=... and link_gb_per_second=... to yours."
        )
    return ACCELERATORS[name]


def detect_accelerator(device_type: str) -> Accelerator:
    """Return this machine's accelerator: the first GPU for "cuda", with its actual memory, otherwise the CPU.

    A GPU that is not in the table is planned as an A100, and its name says so.
    """
    if device_type != "cuda":
        return ACCELERATORS["cpu"]
    found = torch.cuda.get_device_properties(0)
    known = recognize_accelerator(found.name)
    name = f"{found.name}, planned as {_UNKNOWN_GPU}" if known is None else known.name
    return replace(known or ACCELERATORS[_UNKNOWN_GPU], name=name, memory_bytes=found.total_memory)


def recognize_accelerator(name: str) -> Accelerator | None:
    """Return the accelerator that a driver calls `name`; None if the table lacks it."""
    patterns = {**_VARIANTS, **{each: rf"\b{each}\b" for each in ACCELERATORS if each not in _VARIANTS}}
    return next((ACCELERATORS[each] for each, one in patterns.items() if re.search(one, name.lower())), None)


class LayerSeconds(NamedTuple):
    """How long one layer, or the loss, takes for a micro-batch: forward, recomputation, and backward.

    Attributes:
        weights: the part of the backward that makes gradients of weights, which a split backward defers.
        splitting: how much longer the two parts of a split backward take than a whole one.
    """

    forward: float
    recompute: float
    backward: float
    weights: float = 0.0
    splitting: float = 0.0

    @property
    def total(self) -> float:
        """Forward, recomputation and whole backward."""
        return self.forward + self.recompute + self.backward

    def of(self, kind: Kind) -> float:
        """Return the seconds of a task of one kind."""
        found = {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.recompute,
            Kind.BACKWARD: self.backward,
            Kind.INPUT_GRADIENTS: self.backward - self.weights + self.splitting,
            Kind.WEIGHT_GRADIENTS: self.weights,
        }
        return found[kind]

    @classmethod
    def add_up(cls, several: Iterable[LayerSeconds]) -> LayerSeconds:
        """Return the seconds of layers together."""
        return cls(*map(sum, zip(*several, strict=True)))


@dataclass(frozen=True)
class Speed:
    """What an accelerator does per second.

    Attributes:
        peak_flops_per_second: the peak of its arithmetic, at the precision of the run.
        flops_per_second: what products reach.
        bytes_per_second: what operations reach between arithmetic and memory.
        link_bytes_per_second: to a neighbouring accelerator, one way.
        operation_seconds, starts_ahead, hop_seconds, task_seconds: as in `Accelerator`.
    """

    peak_flops_per_second: float
    flops_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float
    operation_seconds: float = 0.0
    starts_ahead: bool = False
    hop_seconds: float = 0.0
    task_seconds: float = 0.0

    @classmethod
    def of(cls, accelerator: Accelerator, precision: str, efficiency: float = EFFICIENCY) -> Speed:
        """Assume that an accelerator reaches the fraction `efficiency` of its peaks, at a precision that it has."""
        peak = accelerator.flops_per_second(precision)
        reached = efficiency * peak, efficiency * accelerator.memory_bandwidth
        start = accelerator.operation_seconds, accelerator.starts_ahead
        beside = accelerator.hop_seconds, accelerator.task_seconds
        return cls(peak, *reached, accelerator.link_bandwidth, *start, *beside)

    def transfer_seconds(self, num_bytes: int) -> float:
        """Return how long a message to a neighbouring accelerator takes; an empty one is not sent."""
        return self.hop_seconds + num_bytes / self.link_bytes_per_second if num_bytes else 0.0

    def seconds(self, profiles: Sequence[LayerProfile]) -> list[LayerSeconds]:
        """Return how long each layer takes if only its operations take time, one after another.

        Each is bound by arithmetic or by memory, whichever takes longer. Starting them adds to that; if a host starts
        them ahead, the layer takes as long as the slower of the two. A compiler that fuses operations does better.
        """
        known: dict[int, LayerSeconds] = {}  # equal layers share their profile
        for profile in profiles:
            if id(profile) not in known:
                forward, backward = self._work(profile.forward), self._work(profile.backward)
                weights = min(self._work(profile.weight_gradients), backward)
                # Both parts read the gradients of the outputs, about half of what is held between them.
                starts = _STARTS_PER_SPLIT * len(profile.waiting_gradients)
                split = self._work(profile.backward, starts, profile.deferred_bytes / 2)
                known[id(profile)] = LayerSeconds(forward, forward, backward, weights, split - backward)
        return [known[id(profile)] for profile in profiles]

    def _work(self, operations: Sequence[Work], more_starts: int = 0, more_bytes: float = 0.0) -> float:
        """Return the seconds of operations, with additional starts and bytes moved."""
        flops, moved = self.flops_per_second, self.bytes_per_second
        works = sum(max(one.flops / flops, one.bytes_moved / moved) for one in operations) + more_bytes / moved
        starts = self.operation_seconds * (len(operations) + more_starts)
        return max(works, starts) if self.starts_ahead else works + starts
