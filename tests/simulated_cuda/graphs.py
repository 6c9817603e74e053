"""CUDA graphs: what is captured is not done, and a replay does it again on the same memory.

Deviation: each graph has memory of its own, where CUDA lets the graphs of a pool use the memory that others let go of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.simulated_cuda import ledger, streams
from tests.simulated_cuda.allocator import Block, find_block
from tests.simulated_cuda.generators import default_generators
from tests.simulated_cuda.ledger import lock
from tests.simulated_cuda.streams import Stream, current_stream


class _Work(NamedTuple):
    """One operation of a graph.

    Attributes:
        name: of the operation.
        compute: does it once more, into the memory of its results.
        read: memory that it reads.
        written: memory that it writes.
        kernel: what `ledger.on_kernel` is told of it.
    """

    name: str
    compute: Callable[[], Any]
    read: list[Block]
    written: list[Block]
    kernel: tuple[Any, ...]


class CUDAGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._work: list[_Work] = []
        self._stream: Stream | None = None
        self._device: torch.device | None = None
        self._made: list[Tensor] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what operations found in memory of others

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = current_stream()
        if stream is streams.default_stream(stream.device):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if capture_error_mode == "global":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing: of another thread")
        self._stream, self._device, self._state = (
            stream,
            stream.device,
            default_generators[stream.device.index].get_state(),
        )
        stream.orders_allocations = True  # memory of a graph is taken back when the device has done all of its work
        stream.capture = self

    def capture_end(self) -> None:
        stream, self._stream = self._stream, None
        assert stream is not None
        stream.capture = None
        default_generators[stream.device.index].set_state(self._state)
        for memory in self._made:  # nothing has been computed; integers may be indices, in a graph to come
            memory.fill_(float("nan") if memory.dtype.is_floating_point else 0)
        for memory, before in self._before.values():
            memory.copy_(before)
        self._made.clear()
        self._before.clear()

    def keep(self, memory: Tensor) -> None:
        """Keep what an operation is about to overwrite, which is then not done after all."""
        storage = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def add(
        self, name: str, compute: Callable[[], Any], read: list[Tensor], written: list[Tensor], kernel: tuple[Any, ...]
    ) -> None:
        """Capture an operation."""
        self._work.append(_Work(name, compute, [*map(find_block, read)], [*map(find_block, written)], kernel))

    def make(self, memory: Tensor) -> None:
        """Note memory that only this graph's operations fill."""
        self._made.append(memory)

    def replay(self) -> None:
        stream = current_stream(self._device)
        if stream.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        with lock:
            number, place = stream.enqueue(), ledger.find_place()
            ledger.counts[f"graphs on {stream.device}"] += 1
            ledger.counts[f"kernels on {stream.device}"] += len(self._work)
            ledger.counts["kernels in graphs"] += len(self._work)
            for work in self._work:
                for blocks, writes in ((work.read, False), (work.written, True)):
                    for block in blocks:
                        block.use(stream, number, work.name, place, writes=writes)
                work.compute()
                if ledger.on_kernel is not None:
                    ledger.on_kernel(*work.kernel)


def graph_pool_handle() -> object:
    """Return what names a pool of memory."""
    return object()
