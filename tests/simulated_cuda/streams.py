"""Streams and events that know what they are ordered after.

A kernel computes when it is called. What CUDA would have promised is kept beside it: a stream's clock says, for each
stream, up to which of its operations everything that the stream does next is ordered. An event is a copy of that clock.
So a wait that is missing is found in every run, not only where the timing is unlucky.

The host has such a clock too. Deviation: all threads of the host share it, as if they told each other all they know.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.cuda import _gpu_trace as trace  # tells torch's own sanitizer what happens

from tests.simulated_cuda import hooks, ledger
from tests.simulated_cuda.ledger import lock

NUM_DEVICES = 8
_DEFAULT = "the default stream of cuda:"
Clock = dict[int, int]  # the number of a stream -> the number of its last operation

_host: Clock = {}
_lessons = 0  # how often the host learned
_local = threading.local()
_NONE: dict[int, Stream] = {}
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()  # by number
_default_streams: dict[int, Stream] = {}
_unfinished: dict[tuple[int, int], threading.Event] = {}  # operations that have not ended: of hanging kernels, receives
_deferred: list[tuple[int, int, Callable[[], None]]] = []  # copies to the host's memory, done when the host waits
exchanging: set[int] = set()  # the numbers of NCCL's streams
_broken: set[int] = set()  # devices on which a kernel failed


class Stream:
    """In the place of torch.cuda.Stream.

    Attributes:
        orders_allocations: whether memory that was freed may still be in use elsewhere, as the next owner waits.
    """

    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        with lock:
            Stream._count += 1
            self.number = Stream._count
            _streams[self.number] = self
        self.device = as_device(device)
        # Torch's fully_shard makes its streams wait for the computing one before it asks for memory on them again.
        self.orders_allocations = "/fsdp/" in sys._getframe(1).f_code.co_filename
        self.name = name or f"the stream made at {ledger.find_place()}"
        self.clock: Clock = {}
        self.capture: Any = None  # the graph that gets what is enqueued, instead of the device
        self._known_of_host = 0
        if self.cuda_stream:
            trace.StreamCreationCallbacks.fire_callbacks(self.cuda_stream)

    def enqueue(self) -> int:
        """Add an operation, after all that the host knows to be done; return its number."""
        if self.device.index in _broken:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        with lock:
            if self._known_of_host != _lessons:
                merge(self.clock, _host)
                self._known_of_host = _lessons
            number = self.clock[self.number] = self.clock.get(self.number, 0) + 1
            return number

    def wait_event(self, event: Event) -> None:
        trace.EventWaitCallbacks.fire_callbacks(event.number, self.cuda_stream)
        with lock:
            merge(self.clock, event.clock)
            # Computing waits: too much of it costs the overlap with copies, which no wrong number would show.
            ledger.counts["waits of default streams"] += self is _default_streams.get(self.device.index)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        trace.StreamSynchronizationCallbacks.fire_callbacks(self.cuda_stream)
        wait_on_host([self.clock], self.device)

    def query(self) -> bool:
        return query(self.clock, self.device)

    @property
    def cuda_stream(self) -> int:
        """CUDA's own number of the stream."""
        return 0 if self.name.startswith(_DEFAULT) else self.number


class Event:
    """In the place of torch.cuda.Event."""

    _count = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.clock: Clock = {}
        with lock:
            Event._count += 1
            self.number = Event._count
        trace.EventCreationCallbacks.fire_callbacks(self.number)
        self._is_timed, self._device = enable_timing, torch.device("cuda", 0)
        self._recorded: float | None = None  # when, in seconds

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        trace.EventRecordCallbacks.fire_callbacks(self.number, stream.cuda_stream)
        with lock:
            self.clock = dict(_host)
            merge(self.clock, stream.clock)
        self._recorded, self._device = time.perf_counter(), stream.device

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        trace.EventSynchronizationCallbacks.fire_callbacks(self.number)
        wait_on_host([self.clock], self._device)

    def query(self) -> bool:
        return query(self.clock, self._device)

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds between two events that the host has waited for."""
        if not (self._is_timed and other._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or other._recorded is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        with lock:
            if not all(covers(_host, event.clock) for event in (self, other)):
                raise RuntimeError("CUDA error: device not ready")
        return (other._recorded - self._recorded) * 1e3


def merge(into: Clock, other: Clock) -> None:
    """Order `into` after all that `other` is ordered after."""
    get = into.get
    for stream, number in other.items():
        if get(stream, 0) < number:
            into[stream] = number


def covers(clock: Clock, other: Clock) -> bool:
    """Return whether a clock is ordered after all that another one is."""
    return all(clock.get(stream, 0) >= number for stream, number in other.items())


def find_unfinished(clock: Clock) -> list[threading.Event]:
    """Return what has not ended of that which a clock is ordered after."""
    with lock:
        for end in [end for end, event in _unfinished.items() if event.is_set()]:
            del _unfinished[end]
        return [event for (stream, number), event in _unfinished.items() if clock.get(stream, 0) >= number]


def add_unfinished(stream: Stream, number: int) -> threading.Event:
    """Let an operation of a stream not end before the event that is returned is set."""
    with lock:
        return _unfinished.setdefault((stream.number, number), threading.Event())


def end_unfinished(stream: Stream) -> None:
    """End what hangs on a stream, as aborting a communicator does."""
    with lock:
        for (number, _), event in _unfinished.items():
            if number == stream.number:
                event.set()


def defer(stream: Stream, number: int, copy: Callable[[], None]) -> None:
    """Do a copy to the host's memory when the host has waited for it: one that reads too early reads what was there."""
    with lock:
        _deferred.append((stream.number, number, copy))


def learn(clocks: Iterable[Clock]) -> None:
    """Let the host know that operations have ended."""
    global _lessons
    with lock:
        _lessons += 1
        for clock in clocks:
            merge(_host, clock)
        for entry in [entry for entry in _deferred if _host.get(entry[0], 0) >= entry[1]]:
            _deferred.remove(entry)
            entry[2]()


def wait_on_host(clocks: Iterable[Clock], device: torch.device) -> None:
    """Let the host wait; it may be for ever."""
    clocks = [dict(clock) for clock in clocks]
    with lock:
        ledger.counts["host synchronisations"] += 1
        ledger.synchronisations[ledger.find_place()] += 1
        ends = [end for clock in clocks for end in clock.items()]
        unknown = {stream: max(number - _host.get(stream, 0), 0) for stream, number in ends}
        # Such a wait has no end where something hangs. Looking at an event first makes it a short one.
        ledger.counts["operations waited for blindly"] += sum(unknown.values())
        ledger.counts["exchanges waited for blindly"] += sum(unknown[stream] for stream in exchanging & set(unknown))
    for clock in clocks:
        for event in find_unfinished(clock):
            event.wait()
    _raise_fault(device)
    learn(clocks)


def query(clock: Clock, device: torch.device) -> bool:
    """Return whether all that a clock is ordered after has ended; the host then knows it."""
    _raise_fault(device)
    if find_unfinished(clock):
        return False
    learn([clock])
    return True


def _raise_fault(device: torch.device) -> None:
    if device.index in _broken:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")


def hang(device: Any = None) -> threading.Event:
    """Enqueue a kernel on a device's current stream that ends when the event that is returned is set."""
    stream = current_stream(device)
    return add_unfinished(stream, stream.enqueue())


def break_device(device: Any = None) -> None:
    """Let a kernel fail on a device: nobody hears of it before something else is asked of the device."""
    _broken.add(as_device(device).index)


def find_host_clock() -> Clock:
    """Return what the host knows to be done."""
    return _host


def as_device(device: Any) -> torch.device:
    """Return the device with its index; None is the current one."""
    if isinstance(device, torch.device) and device.index is not None:
        return device
    if device is None:
        return torch.device("cuda", current_device())
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", current_device()) if device.index is None else device


def current_device() -> int:
    device: int | None = getattr(_local, "device", None)
    return int(hooks.find_library().get_current_device()) if device is None else device


def set_device(device: Any) -> None:
    _local.device = as_device(device).index


def default_stream(device: Any = None) -> Stream:
    index = as_device(device).index
    if (found := _default_streams.get(index)) is not None:
        return found
    with lock:
        if index not in _default_streams:
            name = f"{_DEFAULT}{index}"
            _default_streams[index] = Stream(torch.device("cuda", index), name=name)
        return _default_streams[index]


def current_stream(device: Any = None) -> Stream:
    device = as_device(device)
    chosen: Stream | None = getattr(_local, "streams", _NONE).get(device.index)
    if chosen is None and isinstance(threading.current_thread(), threading._DummyThread):
        chosen = _streams.get(int(hooks.find_library().get_current_stream(device.index)))
    return chosen or default_stream(device)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """In the place of torch.cuda.stream: the current stream of one device, which becomes the current one."""
    if chosen is None:
        yield
        return
    if not hasattr(_local, "streams"):
        _local.streams = {}
    index, device_before = chosen.device.index, current_device()
    stream_before = _local.streams.get(index)
    _set_stream(index, chosen)
    _local.device = index
    try:
        yield
    finally:
        _set_stream(index, stream_before)
        _local.device = device_before


def _set_stream(index: int, chosen: Stream | None) -> None:
    """Make a stream this thread's, for torch's C++ side too; None is the default one."""
    _local.streams[index] = chosen
    hooks.find_library().set_current_stream(index, 0 if chosen is None else chosen.cuda_stream)


def synchronize(device: Any = None) -> None:
    """Wait for all streams of a device."""
    device = as_device(device)
    trace.DeviceSynchronizationCallbacks.fire_callbacks()
    with lock:
        clocks = [one.clock for one in _streams.values() if one.device == device]
    wait_on_host(clocks, device)
