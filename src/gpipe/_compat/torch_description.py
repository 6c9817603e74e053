"""The private interfaces of torch that describe a model without running it; they are the same in torch 2.11 to 2.13.

Torch has no public names for tensors without data, for a mode that sees each operation, or for nests of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy  # noqa: TID251
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig  # noqa: TID251
from torch._subclasses.fake_tensor import unset_fake_temporarily  # noqa: TID251
from torch.utils._device import _device_constructors as list_device_constructors
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode  # noqa: TID251
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only  # noqa: TID251

__all__ = [
    "TorchDispatchMode",
    "list_device_constructors",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "unset_fake_temporarily",
    "watch_allocations",
    "without_compiling",
]

_Result = TypeVar("_Result")


class TorchDispatchMode(_TorchDispatchMode):
    """Torch's mode that sees each operation, without its wrapper against torch.compile: it never runs compiled code."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def watch_allocations(run: Callable[[], _Result]) -> tuple[_Result, list[int]]:
    """Call `run`; return its result and, in order, the bytes of main memory that it allocated (below 0: freed).

    Only a profiler sees torch's allocations of main memory, and torch's public profiler prints two lines at each start.
    """
    _enable_profiler_legacy(
        ProfilerConfig(
            ProfilerState.CPU,
            report_input_shapes=False,
            profile_memory=True,
            with_stack=False,
            with_flops=False,
            with_modules=False,
            experimental_config=_ExperimentalConfig(),
        )
    )
    try:
        result = run()
    finally:
        threads = _disable_profiler_legacy()
    events: Iterable[Any] = (event for thread in threads for event in thread)  # torch's stub has another kind
    return result, [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]


@contextmanager
def without_compiling() -> Iterator[None]:
    """Run compiled modules uncompiled within a recording of torch.fx, which torch.compile otherwise refuses."""
    dynamo = sys.modules.get("torch._dynamo")  # loaded only if something is compiled; loading it takes seconds
    if dynamo is None:
        yield
        return
    with dynamo.config.patch(error_on_nested_fx_trace=False):
        yield
