"""Reads when the tasks of a step run, on the host or on GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from gpipe.pipeline.schedule import Task
from gpipe.pipeline.timeline import Event, Timeline

if TYPE_CHECKING:
    from gpipe.pipeline.job.job import Job


class Clock:
    """Times the tasks of one step.

    On the CPU it reads the host's clock; on CUDA it records events in the stream, and nothing waits for them before
    `events` is called. Times are seconds since the epoch, so that those of several processes can be compared (across
    hosts, as well as their clocks agree).

    Args:
        devices: those on which tasks will run; they must be idle.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        # What turns a reading of the performance counter into seconds since the epoch. If the process is interrupted
        # between the two readings, it is too small, and tasks would seem to run before those that they waited for.
        self._offset = max(time.time() - time.perf_counter() for _ in range(16))
        self._host: list[tuple[Task, float, float]] = []
        self._device: list[tuple[Task, torch.device, torch.cuda.Event, torch.cuda.Event]] = []
        self._origins = {
            device: (time.perf_counter(), self._mark(device)) for device in set(devices) if device.type == "cuda"
        }

    def start(self, device: torch.device) -> float | torch.cuda.Event:
        """Return a mark of when a task begins on a device, for `stop`."""
        if device.type != "cuda":
            return time.perf_counter()
        return self._mark(device)

    def stop(self, task: Task, device: torch.device, mark: float | torch.cuda.Event | None) -> None:
        """Note that a task ends that began at a mark."""
        if isinstance(mark, float):
            self._host.append((task, mark, time.perf_counter()))
        else:
            assert mark is not None
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


def gather_timeline(clock: Clock, job: Job, num_devices: int, placement: tuple[int, ...]) -> Timeline:
    """Return the timeline of a step on all stages, from 0 on; every process calls it with the clock of its tasks."""
    own = Timeline(tuple(clock.events()), num_devices, placement)
    rows = [row for part in job.gather(own.to_json()) for row in part]
    origin = min(row[3] for row in rows)
    moved = [[*row[:3], row[3] - origin, row[4] - origin] for row in rows]
    return Timeline.from_json(moved, num_devices, placement)
