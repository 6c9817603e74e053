"""What this process's GPUs were given and have not done yet, as far as it is known."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class DeviceStep(NamedTuple):
    """Something that a GPU does after what it was given before.

    Attributes:
        event: behind it.
        text: what it is, such as "stage 1, micro-batch 0, forward".
        stage: whose task it is; None where it belongs to none.
        micro_batch: likewise.
        rank: of the process whose data it waits for; None where the GPU itself works.
    """

    event: torch.cuda.Event
    text: str
    stage: int | None = None
    micro_batch: int | None = None
    rank: int | None = None


@dataclass(slots=True, eq=False)
class Delivery:
    """Data on their way to another process.

    Attributes:
        rank: of that process.
        ready: comes when the data have been computed.
        sent: comes when they have been sent; None until NCCL was told to.
    """

    rank: int
    ready: torch.cuda.Event
    sent: torch.cuda.Event | None = None


class DeviceWork:
    """The steps that GPUs have not done yet, in the order in which they can do them.

    The host runs far ahead of its GPUs. Where it waits for one, it must not wait in CUDA, where nothing could end the
    wait: it looks at these events again and again. The first that has not come tells what is waited for.

    Attributes:
        num_done: how many steps were seen to be done: the progress of the GPUs.
        since: when the first one became the first, by the monotonic clock.
    """

    def __init__(self) -> None:
        self._steps: deque[DeviceStep] = deque()
        self._deliveries: list[Delivery] = []
        self._lock = threading.Lock()
        self.num_done = 0
        self.since = time.monotonic()

    def add(self, device: torch.device, doing: str, stage: int | None = None, micro_batch: int | None = None) -> None:
        """Note all that the current stream of a device was given so far; a CPU has done it already."""
        if device.type == "cuda":
            event = torch.cuda.current_stream(device).record_event()
            text = doing if stage is None else f"stage {stage}, micro-batch {micro_batch}, {doing}"
            self._append(DeviceStep(event, text, stage, micro_batch))

    def expect(self, arrived: torch.cuda.Event, rank: int) -> None:
        """Note that what comes next needs data of another process, behind an event."""
        self._append(DeviceStep(arrived, f"data from rank {rank}", rank=rank))

    def find_first(self) -> DeviceStep | None:
        """Return the first step that is not done; None where all are.

        Raises:
            RuntimeError: a GPU failed.
        """
        with self._lock:
            while self._steps and self._steps[0].event.query():
                self._steps.popleft()
                self.num_done += 1
                self.since = time.monotonic()
            return self._steps[0] if self._steps else None

    def deliver(self, delivery: Delivery) -> None:
        """Note data that are being sent."""
        with self._lock:
            self._deliveries.append(delivery)

    def find_undelivered(self) -> list[int]:
        """Return the ranks of those for whom data are ready that have not been sent: they need not want them yet.

        Raises:
            RuntimeError: a GPU failed.
        """
        with self._lock:
            left = [one for one in self._deliveries if one.sent is None or not one.sent.query()]
            self._deliveries = left
            return sorted({one.rank for one in left if one.ready.query()})

    def first_text(self) -> str:
        """Return what the first step that is not known to be done is, without asking a GPU."""
        with self._lock:
            return self._steps[0].text if self._steps else "between two steps"

    def clear(self) -> None:
        """Forget everything, after a failure."""
        with self._lock:
            self._steps.clear()
            self._deliveries.clear()

    def mark(self, devices: Iterable[torch.device]) -> None:
        """Note what the devices were given since the last step."""
        for device in set(devices):
            self.add(device, f"the work of {device} between two tasks")

    def _append(self, step: DeviceStep) -> None:
        with self._lock:
            if not self._steps:
                self.since = time.monotonic()
            self._steps.append(step)
