"""The rules of CUDA's caching allocator: memory belongs to the stream that it was asked for on.

Freed memory goes to the next tensor of that stream at once, while other streams may still work on what was there:
unless `record_stream` told the allocator of them, or the stream itself waits for them. And whoever reads or writes
memory must be ordered after the last write, and a write after all uses.
"""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as trace

from tests.simulated_cuda import streams
from tests.simulated_cuda.ledger import complain, lock
from tests.simulated_cuda.streams import Stream


class Block:
    """Memory that the allocator handed out.

    Attributes:
        home: the stream on which it was asked for.
        num_bytes: its size; rounding and fragmentation are left out.
        recorded: streams that the allocator was told of.
        end: what calls when the memory is let go of.
    """

    end: weakref.ref[torch.UntypedStorage]

    def __init__(self, home: Stream, num_bytes: int) -> None:
        self.home, self.num_bytes = home, num_bytes
        self.recorded: set[Stream] = set()
        self._written: tuple[Stream, int, str] | None = None
        self._used: dict[int, tuple[Stream, int, str]] = {}  # the last use by each stream

    def use(self, stream: Stream, number: int, operation: str, place: str, *, writes: bool) -> None:
        """Note that operation `number` of a stream uses the block, which must be ordered after what others did.

        place: where the code under test is.
        """
        if self._written is not None and (before := _unordered(self._written, stream)):
            complain(f"race: {operation} on {stream.name} at {place} does not wait for the write on {before}")
        for use in self._used.values() if writes else ():
            if before := _unordered(use, stream):
                complain(f"race: {operation} on {stream.name} at {place} overwrites what is still in use on {before}")
        if writes:
            self._written = stream, number, place
        self._used[stream.number] = stream, number, place

    def free(self) -> None:
        """Take the block back."""
        allocated_bytes[self.home.device.index] -= self.num_bytes
        if self.home.orders_allocations:
            return
        known = dict(self.home.clock)
        streams.merge(known, streams.find_host_clock())
        for stream in self.recorded:
            streams.merge(known, stream.clock)
        for stream, number, place in self._used.values():
            if stream is not self.home and known.get(stream.number, 0) < number:
                complain(f"freed too early: memory of {self.home.name}, in use on {stream.name} at {place}")


def _unordered(use: tuple[Stream, int, str], stream: Stream) -> str:
    """Return in words a use that a stream is not ordered after; nothing where it is."""
    other, number, place = use
    return "" if other is stream or stream.clock.get(other.number, 0) >= number else f"{other.name} at {place}"


_blocks: dict[int, Block] = {}
allocated_bytes: Counter[int] = Counter()
"""By device."""

peak_bytes: Counter[int] = Counter()
"""The most so far, by device."""

memory_bytes: int | None = None
"""Of each device; None is without end."""


def allocate(tensor: Tensor, home: Stream) -> Block:
    """Return the block of a tensor's memory, which is a new one of a stream where nobody asked for it before."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    with lock:
        if (block := _blocks.get(key)) is None:
            num_bytes, address = storage.nbytes(), storage.data_ptr()
            _add(home.device.index, num_bytes)
            block = _blocks[key] = Block(home, num_bytes)
            if num_bytes:
                trace.MemoryAllocationCallbacks.fire_callbacks(address)
            block.end = weakref.ref(storage, lambda _: _free(key, address))
        return block


def _add(device: int, num_bytes: int) -> None:
    if memory_bytes is not None and allocated_bytes[device] + num_bytes > memory_bytes:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes on GPU {device}")
    allocated_bytes[device] += num_bytes
    peak_bytes[device] = max(peak_bytes[device], allocated_bytes[device])


def reset_peak(device: int) -> None:
    """Let the most be what is allocated now."""
    peak_bytes[device] = allocated_bytes[device]


def _free(key: int, address: int) -> None:
    with lock:
        if (block := _blocks.pop(key, None)) is not None:
            block.free()
            if block.num_bytes:
                trace.MemoryDeallocationCallbacks.fire_callbacks(address)


def is_known(tensor: Tensor) -> bool:
    """Return whether a tensor's memory has a block."""
    return tensor.untyped_storage()._cdata in _blocks


def find_block(tensor: Tensor) -> Block:
    """Return the block of a tensor's memory."""
    return _blocks[tensor.untyped_storage()._cdata]
