"""Put the simulation in the place of torch.cuda's runtime. Import it after `hooks.load()`."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import torch

from tests.simulated_cuda import allocator, generators, graphs, hooks, ledger, nccl, streams, tensors
from tests.simulated_cuda.ledger import lock

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
        "CUDAGraph": graphs.CUDAGraph,
        "graph_pool_handle": graphs.graph_pool_handle,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "current_device": streams.current_device,
        "set_device": streams.set_device,
        "synchronize": streams.synchronize,
        "default_generators": generators.default_generators,
        "device_count": _count_devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "memory_allocated": lambda device=None: allocator.allocated_bytes[streams.as_device(device).index],
        "max_memory_allocated": lambda device=None: allocator.peak_bytes[streams.as_device(device).index],
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peak(streams.as_device(device).index),
        "get_device_name": lambda device=None: "a simulated GPU",
        "get_device_properties": _describe_device,
        "empty_cache": lambda: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
        "check_error": lambda result: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    # A build with CUDA would ask the driver whether the GPU has these kernels; other builds compute without them.
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, enable)(False)
    nccl.install()
    torch.zeros(1, pin_memory=True)  # torch's C++ side counts as initialised from here on, and looks at pinned memory


def _count_devices() -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves: a fork may have another one than what it is a fork of."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return streams.NUM_DEVICES if visible is None else len(visible.split(","))


def _register(address: int, num_bytes: int, flags: int) -> int:
    with lock:
        ledger.registered[address] = num_bytes
        hooks.find_library().register_host_memory(ctypes.c_void_p(address))
    return 0


def _unregister(address: int) -> int:
    with lock:
        del ledger.registered[address]
        hooks.find_library().unregister_host_memory(ctypes.c_void_p(address))
    return 0


def _describe_device(device: Any = None) -> SimpleNamespace:
    """Return the properties of a device that programs ask for."""
    return SimpleNamespace(
        name=torch.cuda.get_device_name(device),
        total_memory=allocator.memory_bytes or 80 * 2**30,
        L2_cache_size=50 * 2**20,
    )
