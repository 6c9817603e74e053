"""Accelerators to plan for: memory, arithmetic, and the links between them.

Figures are the makers', of one device as a stage uses it: of a TPU a core, which is half a chip. Reached are less; how
much less is the plan's `efficiency`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: as plan.py takes it.
        memory_bytes: of its main memory.
        float32_flops: FLOP/s of products of float32 numbers as torch computes them (on a TPU as XLA does by default:
            inputs rounded to bfloat16).
        bfloat16_flops: FLOP/s of products under autocast to bfloat16; without such units those of float32.
        memory_bandwidth: bytes/s between its memory and its arithmetic units.
        link_bandwidth: bytes/s to a neighbouring device, in one direction.
    """

    name: str
    memory_bytes: int
    float32_flops: float
    bfloat16_flops: float
    memory_bandwidth: float
    link_bandwidth: float

    def flops_per_second(self, precision: str) -> float:
        """Return the FLOP/s for "float32" or "bfloat16"."""
        return {"float32": self.float32_flops, "bfloat16": self.bfloat16_flops}[precision]

    def with_limits(self, *, memory_gib: float | None, link_gb_per_second: float | None) -> Device:
        """Return the device with other figures than the maker's, where they are given."""
        memory = self.memory_bytes if memory_gib is None else int(memory_gib * GIB)
        link = self.link_bandwidth if link_gb_per_second is None else link_gb_per_second * 1e9
        return replace(self, memory_bytes=memory, link_bandwidth=link)


_T = 1e12
_G = 1e9

# TPUs: Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks" (CACM 2020), table 1; a link
# of 496 (v2) or 656 (v3) Gbit/s. GPUs: NVIDIA's data sheets, without sparsity. P40 and P100 stand in PCI-E slots of 16
# lanes of generation 3, and without NVLink a copy goes through the host: over two of them, so at half the 12 GB/s that
# one reaches.
_ALL = (
    Device("tpu_v2", 8 * GIB, 23 * _T, 23 * _T, 350 * _G, 62 * _G),
    Device("tpu_v3", 16 * GIB, 61.5 * _T, 61.5 * _T, 450 * _G, 82 * _G),
    Device("p40", 24 * GIB, 11.76 * _T, 11.76 * _T, 346 * _G, 6 * _G),
    Device("p100", 16 * GIB, 9.3 * _T, 9.3 * _T, 732 * _G, 6 * _G),
    Device("v100", 32 * GIB, 15.7 * _T, 15.7 * _T, 900 * _G, 150 * _G),
    Device("a100", 80 * GIB, 19.5 * _T, 312 * _T, 2039 * _G, 300 * _G),
    Device("h100", 80 * GIB, 67 * _T, 989 * _T, 3350 * _G, 450 * _G),
    Device("h200", 141 * GIB, 67 * _T, 989 * _T, 4800 * _G, 450 * _G),
)
DEVICES = {device.name: device for device in _ALL}


def find_device(name: str) -> Device:
    """Return the device called `name`. Raises ValueError with the list of names for one that is not in it."""
    if name not in DEVICES:
        raise ValueError(
            f"device is {name}, expected one of {', '.join(DEVICES)}: set device=... to the nearest one, and its "
            "memory_gib=... and link_gb_per_second=... to yours."
        )
    return DEVICES[name]
