"""What this process's GPUs have been given and have not finished, as far as is known."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gpipe.pipeline.job.activity import Activity
from gpipe.pipeline.job.errors import PipelineError

_LONGEST_PAUSE_SECONDS = 1e-3  # between two looks at a GPU
_PAUSE_SHARE = 0.01  # of the time waited so far: pauses lengthen a wait by no more


class DeviceStep(NamedTuple):
    """Something that a GPU does after what it was given before.

    Attributes:
        event: recorded after it.
        text: what it is, such as "stage 1, micro-batch 0, forward".
        stage: whose task it is; None if it belongs to none.
        micro_batch: likewise.
        ranks: of the processes whose data it waits for; none if the GPU itself works.
    """

    event: torch.cuda.Event
    text: str
    stage: int | None = None
    micro_batch: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Delivery:
    """Data on their way to other processes.

    Attributes:
        ranks: of those processes.
        ready: the event after which the data have been computed.
        sent: the event after which they have been sent; None until NCCL has been told to send them.
    """

    ranks: tuple[int, ...]
    ready: torch.cuda.Event
    sent: torch.cuda.Event | None = None


class DeviceWork:
    """The steps that GPUs have not done yet, in the order in which they can do them.

    The host runs far ahead of its GPUs. When it waits for one, it must not wait in CUDA, where nothing could end the
    wait: it polls these events. The first that has not come tells what the host waits for.

    Args:
        timeout_seconds: how long a GPU may work on one step.

    Attributes:
        stage: of the process, for errors; None if it has several.
        activity: what the process is doing, for messages.
        num_done: how many steps are known to be done: the progress of the GPUs.
        since: when the first step became the first, by the monotonic clock.
    """

    def __init__(self, activity: Activity, timeout_seconds: float, stage: int | None) -> None:
        self.activity = activity
        self._timeout_seconds, self.stage = timeout_seconds, stage
        self._steps: deque[DeviceStep] = deque()
        self._deliveries: list[Delivery] = []
        self._lock = threading.Lock()
        self.num_done = 0
        self.since = time.monotonic()

    def add(self, gpu: torch.device, doing: str, stage: int, micro_batch: int) -> None:
        """Note what the current stream of a GPU has been given for a task."""
        event = torch.cuda.current_stream(gpu).record_event()
        self._append(DeviceStep(event, f"stage {stage}, micro-batch {micro_batch}, {doing}", stage, micro_batch))

    def expect(self, arrived: torch.cuda.Event, *ranks: int) -> None:
        """Note that what comes next needs data of other processes, which have arrived after an event."""
        self._append(DeviceStep(arrived, f"data from rank {', '.join(map(str, ranks))}", ranks=ranks))

    @contextmanager
    def exchanging(self, device: torch.device, ranks: Sequence[int]) -> Iterator[None]:
        """Note that what the body gives to a device's current stream waits for data of other processes, as they do.

        What the stream was given before is this process's own work: if that hangs, this process is to blame.
        """
        if device.type != "cuda":
            yield
            return
        ready = self._mark(device)
        yield
        arrived = torch.cuda.current_stream(device).record_event()
        self.expect(arrived, *ranks)
        self.deliver(Delivery(tuple(ranks), ready, arrived))

    def wait_for_devices(self, devices: Iterable[torch.device], check: Callable[[], None]) -> None:
        """Wait until GPUs have done all that their current streams were given; a CPU has.

        check: raises an error that ends the wait.

        Raises:
            PipelineError: a GPU failed, or did nothing for longer than the time-out.
        """
        for device in set(devices):
            if device.type == "cuda":
                self._mark(device)
        begin = time.monotonic()
        while (step := self.find_first()) is not None:
            check()
            now = time.monotonic()
            if not step.ranks and now - self.since > self._timeout_seconds:
                text = f"{step.text}: the GPU has not finished it for {self._timeout_seconds:g} s"
                text = f"{text}; see what happens there, or raise timeout_seconds"
                stage = self.stage if step.stage is None else step.stage
                raise PipelineError(text, stage=stage, micro_batch=step.micro_batch)
            time.sleep(min((now - begin) * _PAUSE_SHARE, _LONGEST_PAUSE_SECONDS))
        check()  # a device's wait that was cut off ends without an error

    def find_first(self) -> DeviceStep | None:
        """Return the first step that is not done; None where all are.

        Raises:
            PipelineError: a GPU failed.
        """
        with self._lock:
            while self._steps:
                try:
                    is_done = self._steps[0].event.query()
                except RuntimeError as error:
                    text = f"{self._steps[0].text}, or right after it: {type(error).__name__}: {error}"
                    raise PipelineError(text, stage=self.stage) from error
                if not is_done:
                    return self._steps[0]
                self._steps.popleft()
                self.num_done += 1
                self.since = time.monotonic()
        return None

    def deliver(self, delivery: Delivery) -> None:
        """Note data that are being sent."""
        with self._lock:
            self._deliveries.append(delivery)

    def find_undelivered(self) -> list[int]:
        """Return the ranks for which data are ready that have not been sent; they may not need them yet."""
        with self._lock, suppress(RuntimeError):  # a GPU failed: the thread that waits for it reports that
            left = [one for one in self._deliveries if one.sent is None or not one.sent.query()]
            self._deliveries = left
            return sorted({rank for one in left if one.ready.query() for rank in one.ranks})
        return []

    def clear(self) -> None:
        """Forget everything, after a failure."""
        with self._lock:
            self._steps.clear()
            self._deliveries.clear()

    def _mark(self, device: torch.device) -> torch.cuda.Event:
        """Note what the current stream of a device was given since the last step, and return the event after it."""
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        self._append(DeviceStep(event, f"{self.activity}, on {device}"))
        return event

    def _append(self, step: DeviceStep) -> None:
        with self._lock:
            if not self._steps:
                self.since = time.monotonic()
            self._steps.append(step)
