"""The private interfaces of torch that planning calls; they are the same in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

_Result = TypeVar("_Result")


def watch_allocations(run: Callable[[], _Result]) -> tuple[_Result, list[int]]:
    """Run something; return its result, and what it took of main memory and gave back (below 0), in order, in bytes.

    Only a profiler sees torch's allocator of main memory. Torch's public one prints two lines at each start.
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
