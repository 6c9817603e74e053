"""Count what operations allocate and compute while they run on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gpipe._compat.flop_counts import count_flops
from gpipe._compat.torch_description import TorchDispatchMode
from gpipe.planning.operation_memory import OperationMemory

_aten = torch.ops.aten
_Result = TypeVar("_Result")


class Work(NamedTuple):
    """One operation: FLOPs of products, convolutions and attention (a multiply-add is 2), and bytes read or written."""

    flops: int
    bytes_moved: int


class Moment(NamedTuple):
    """What is alive after an operation, in bytes.

    Attributes:
        live: of the storages that the ledger counts.
        added: what would also be alive according to the caller.
        aside: the part of `live` that was set aside.
        waiting: of storages that have died but would be held for longer.
    """

    live: int
    added: int
    aside: int
    waiting: int


class Ledger(TorchDispatchMode):
    """Notes every operation in the body: which storages are alive at each moment, and the work.

    A storage lives from the operation that returns it until nothing refers to it any more: what a graph keeps for
    backward is alive. What an operation allocates and frees internally, such as a convolution's workspace, is only seen
    if it is measured.

    Args:
        elsewhere: tensors that outlive the ledger and are counted elsewhere, such as parameters.
        measured: measures the internal memory of operations; None measures nothing.
        converted: the type of autocast's copies of weights, which it keeps for the whole step; None without autocast.

    Attributes:
        live_bytes: the bytes that are alive now.
        moments: since `start_moments`, one for each new storage.
        added_bytes: what would also be alive according to the caller; `start_moments` sets it to 0.
        work: of each operation since `take_work`.
        converted_bytes: of autocast's copies of trainable weights; counted only here.
        on_free: by the id of a storage, what to call once when it dies.
    """

    def __init__(
        self,
        elsewhere: Iterable[Tensor] = (),
        measured: OperationMemory | None = None,
        converted: torch.dtype | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._measured, self._converted = measured, converted
        self.converted_bytes = 0
        self._outside = [tensor.untyped_storage() for tensor in elsewhere]  # held, so that their ids are not reused
        self._elsewhere = {storage._cdata for storage in self._outside}
        self.live_bytes = 0
        self.added_bytes = 0
        self.moments: list[Moment] = []
        self.work: list[Work] = []
        self.on_free: dict[int, Callable[[], None]] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._aside: dict[int, int] = {}  # living storages, and their bytes
        self._aside_bytes = 0  # their sum
        self._to_wait: set[int] = set()  # living storages that would be held for longer
        self._waiting_bytes = 0  # of those that have died

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at any of the moments."""
        return max((moment.live for moment in self.moments), default=0)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made outside the body, such as a mini-batch, as alive."""
        for tensor in tensors:
            self._see(tensor)

    def start_moments(self, aside: Iterable[Tensor] = ()) -> None:
        """Forget the moments so far, and note this one; from here on count the tensors `aside` separately."""
        storages = (tensor.untyped_storage() for tensor in aside)
        self._aside = {one._cdata: one.nbytes() for one in storages if one._cdata in self._alive}
        self._aside_bytes = sum(self._aside.values())
        self._to_wait.clear()
        self._waiting_bytes = 0
        self.added_bytes = 0
        self.moments = []
        self._note(self.live_bytes)

    def wait(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as waiting after it dies, until `start_moments`; one that is set aside is held anyway."""
        if storage._cdata in self._alive and storage._cdata not in self._aside:
            self._to_wait.add(storage._cdata)

    def run_beside(self, run: Callable[[], _Result]) -> tuple[_Result, list[Work], int]:
        """Return the result of `run`, its work, and the peak bytes of what it allocated; the ledger counts neither."""
        work, self.work = self.work, []
        start, num_moments = self.live_bytes, len(self.moments)
        result = run()
        done, self.work = self.work, work
        peak_bytes = max((one.live - start for one in self.moments[num_moments:]), default=0)
        del self.moments[num_moments:]
        return result, done, peak_bytes

    def take_work(self) -> tuple[Work, ...]:
        """Return the work since the last call."""
        taken, self.work = tuple(self.work), []
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it did."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = list(find_tensors(result))
        if not outputs:
            return result
        if self._is_conversion(func, args[:1], outputs[0]):
            storage = outputs[0].untyped_storage()
            self._elsewhere.add(storage._cdata)
            weakref.finalize(storage, self._elsewhere.discard, storage._cdata)
            self.converted_bytes += outputs[0].nbytes
            return result
        if self._measured is not None and not func.is_view and any(True for _ in find_tensors((args, kwargs))):
            taken = self._measured.measure(func, args, kwargs)
            self._note(self.live_bytes + taken.peak_bytes)
            result = taken.complete(result)
            outputs = list(find_tensors(result))
        if not func.is_view and func.overloadpacket not in _ALLOCATIONS:
            self.work.append(
                Work(count_flops(func, args, kwargs, result), count_moved_bytes(func, args, kwargs, outputs))
            )
        for tensor in outputs:
            self._see(tensor)
        return result

    def _is_conversion(self, func: Any, source: tuple[Any, ...], result: Tensor) -> bool:
        """Return whether autocast converts a weight and keeps the result, as it does for weights with a gradient.

        A layer that converts a weight itself looks the same here, although it converts it each time.
        """
        if func is not _aten._to_copy.default or result.dtype != self._converted or not source[0].requires_grad:
            return False
        return source[0].untyped_storage()._cdata in self._elsewhere

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._elsewhere:
            return

        def free(_: Any) -> None:
            if self._alive.pop(key, None) is not None:
                self.live_bytes -= size
                self._aside_bytes -= self._aside.pop(key, 0)
                if key in self._to_wait:
                    self._to_wait.remove(key)
                    self._waiting_bytes += size
                if key in self.on_free:
                    self.on_free.pop(key)()

        self._alive[key] = weakref.ref(storage, free)
        self.live_bytes += size
        self._note(self.live_bytes)

    def _note(self, live_bytes: int) -> None:
        self.moments.append(Moment(live_bytes, self.added_bytes, self._aside_bytes, self._waiting_bytes))


def count_moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> int:
    """Count the bytes that an operation reads or writes; of a tensor that it indexes, only the places that it uses."""
    if func.overloadpacket in _PLACES:
        index, moved = args[2], _PLACES[func.overloadpacket]
        return int(index.nbytes + moved * index.numel() * args[0].itemsize)
    if func.overloadpacket in _ROWS:
        return sum(tensor.nbytes for tensor in chain(find_tensors(args[1:]), outputs, outputs))
    read = find_tensors((args, kwargs | {"out": None}))
    return sum(tensor.nbytes for tensor in chain(read, outputs))


def find_tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in what an operation takes or returns, faster than torch's functions for nests."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from find_tensors(part)
    elif isinstance(nest, dict):
        yield from find_tensors(tuple(nest.values()))


_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}

# How often each place is read or written: input and output; summand, input and output.
_PLACES: dict[Any, int] = {_aten.gather: 2, _aten.scatter_add_: 3}

# These read as much of their first tensor as they return.
_ROWS = {_aten.embedding, _aten.index, _aten.index_select}
