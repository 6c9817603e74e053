"""Measure when the tasks of a step run, on the host or on the GPU that runs them."""

from __future__ import annotations

import time

import torch

from gpipe.pipeline.schedule import Task
from gpipe.pipeline.timeline import Event


class Clock:
    """Times the tasks of one step.

    On the CPU it reads the host's clock; on CUDA it leaves events in the stream, and nothing waits for them before
    `events` is called. Times are seconds since the epoch, so that those of several processes can stand side by side (of
    several hosts, as well as their clocks agree).

    Args:
        cuda: whether to leave events on CUDA devices; without, tasks there are not timed.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._offset = time.time() - time.perf_counter()
        self._host: list[tuple[Task, float, float]] = []
        self._device: list[tuple[Task, torch.device, torch.cuda.Event, torch.cuda.Event]] = []
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def start(self, device: torch.device) -> float | torch.cuda.Event | None:
        """Return a mark of when a task begins on a device, for `stop`."""
        if device.type != "cuda":
            return time.perf_counter()
        if not self._cuda:
            return None
        if device not in self._origins:
            torch.cuda.synchronize(device)
            self._origins[device] = time.perf_counter(), self._mark(device)
        return self._mark(device)

    def stop(self, task: Task, device: torch.device, mark: float | torch.cuda.Event | None) -> None:
        """Note that a task ends, which began at a mark."""
        if isinstance(mark, float):
            self._host.append((task, mark, time.perf_counter()))
        elif mark is not None:
            self._device.append((task, device, mark, self._mark(device)))

    def events(self) -> list[Event]:
        """Return the tasks with their times; on CUDA, wait for them first."""
        found = [Event(task, start + self._offset, end + self._offset) for task, start, end in self._host]
        for task, device, before, after in self._device:
            after.synchronize()
            origin, mark = self._origins[device]
            origin += self._offset
            found.append(Event(task, origin + mark.elapsed_time(before) / 1e3, origin + mark.elapsed_time(after) / 1e3))
        return found

    @staticmethod
    def _mark(device: torch.device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
