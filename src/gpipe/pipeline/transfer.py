"""The boundary between two stages: activations forward, gradients back. Here, within one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.pipeline.microbatch import Payload, read_versions
from gpipe.pipeline.schedule import Task


class MiniBatch(NamedTuple):
    """What every stage must know about the current mini-batch."""

    num_examples: int
    num_microbatches: int


class LocalTransfer:
    """Hands tensors from stage to stage in one process, copying only where the device changes.

    On CUDA a copy runs on streams of its own, so that it overlaps with the computation of both devices.
    `wire.transfer.ProcessTransfer` has the same methods for stages in several processes.

    Args:
        devices: the device of each stage; the same one may appear several times.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._mail: dict[Task, tuple[Payload, list[int], torch.cuda.Event | None]] = {}
        self._streams = {device: torch.cuda.Stream(device) for device in set(devices) if device.type == "cuda"}

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step. The first stage's process knows the mini-batch; the others pass None and are told."""
        assert batch is not None
        return batch

    def send(self, task: Task, payload: Payload) -> None:
        """Send a boundary output to the stage after the task's, or gradients to the one before, without waiting."""
        kind, stage, micro_batch = task
        neighbour = stage - 1 if kind.makes_gradients else stage + 1
        here, there = self.devices[stage], self.devices[neighbour]
        tensors = [tensor.detach() for tensor in payload.tensors]
        event = None
        if here != there:
            tensors, event = self._copy(tensors, here, there)
        mail = payload.replace(tensors), read_versions(tensors), event
        self._mail[Task(kind.direction, neighbour, micro_batch)] = mail

    def receive(self, task: Task) -> Payload:
        """Return the boundary input that a forward needs, or the gradients of the outputs that a backward needs.

        The tensors are detached. A payload of gradients holds a tuple, with None where there is no gradient.
        """
        payload, versions, event = self._mail.pop(Task(task.kind.direction, task.stage, task.micro_batch))
        if read_versions(payload.tensors) != versions:
            raise ValueError(
                f"a neighbour of stage {task.stage} changed a tensor in place after passing it on; pass on a .clone()"
            )
        if event is not None:
            stream = torch.cuda.current_stream(self.devices[task.stage])
            stream.wait_event(event)
            for tensor in payload.tensors:
                tensor.record_stream(stream)
        return payload

    def reset(self) -> None:
        """Drop everything in transit, after a step that failed."""
        self._mail.clear()

    def join(self) -> None:
        """Wait for threads: here there are none."""

    def close(self) -> None:
        """Release threads and connections: here there are none."""

    def _copy(
        self, tensors: list[Tensor], here: torch.device, there: torch.device
    ) -> tuple[list[Tensor], torch.cuda.Event | None]:
        if here.type != "cuda" or there.type != "cuda":  # to or from the CPU: rare, and must not race with the host
            return [tensor.to(there) for tensor in tensors], None
        source, target = self._streams[here], self._streams[there]
        source.wait_stream(torch.cuda.current_stream(here))
        with torch.cuda.stream(target), torch.cuda.stream(source):
            copies = [tensor.to(there, non_blocking=True) for tensor in tensors]
        for tensor in tensors:
            tensor.record_stream(source)
        event = torch.cuda.Event()
        event.record(target)
        return copies, event
