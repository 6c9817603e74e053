"""Put the simulation in the place of torch.cuda's runtime. Import it after `device_threads.load()`."""

from __future__ import annotations

from typing import Any

import torch

from tests.simulated_cuda import allocator, generators, nccl, streams, tensors

_kept: list[Any] = []


def install() -> None:
    """From now on this process has GPUs."""
    if _kept:
        return
    _kept.append(tensors.register_factories())
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to() makes parameters of our own class
    replaced: dict[str, Any] = {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "current_device": streams.current_device,
        "set_device": streams.set_device,
        "synchronize": streams.synchronize,
        "default_generators": generators.default_generators,
        "device_count": lambda: streams.NUM_DEVICES,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "memory_allocated": lambda device=None: allocator.allocated_bytes[streams.as_device(device).index],
        "max_memory_allocated": lambda device=None: allocator.peak_bytes[streams.as_device(device).index],
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peak(streams.as_device(device).index),
        "get_device_name": lambda device=None: "a simulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    nccl.install()
