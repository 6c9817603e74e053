"""The boundary between two stages: activations forward, gradients back. Here, within one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpipe.pipeline.microbatch import Payload


class MiniBatch(NamedTuple):
    """What every stage must know of the mini-batch under way."""

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
        self._mail: dict[tuple[str, int, int], tuple[Payload, torch.cuda.Event | None]] = {}
        self._streams = {device: torch.cuda.Stream(device) for device in set(devices) if device.type == "cuda"}

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step. The first stage's process knows the mini-batch; the others pass None and are told."""
        assert batch is not None
        return batch

    def send_forward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send a boundary output of `stage` to the next stage, without waiting."""
        self._mail["forward", stage + 1, micro_batch] = self._move(payload, stage, stage + 1)

    def receive_forward(self, stage: int, micro_batch: int) -> Payload:
        """Return the boundary input of `stage`: tensors without history that share no graph with the sender's."""
        return self._take("forward", stage, micro_batch)

    def send_backward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send the gradients of the boundary input of `stage` to the previous stage, without waiting."""
        self._mail["backward", stage - 1, micro_batch] = self._move(payload, stage, stage - 1)

    def receive_backward(self, stage: int, micro_batch: int) -> list[Tensor | None]:
        """Return the gradients of the boundary outputs of `stage`, None where there is none."""
        return list(self._take("backward", stage, micro_batch).value())

    def reset(self) -> None:
        """Drop what was under way, after a step that failed."""
        self._mail.clear()

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the stages in other processes why nothing will come any more: here, there are none."""

    def close(self) -> None:
        """Release threads and connections: here, there are none."""

    def _move(self, payload: Payload, source: int, target: int) -> tuple[Payload, torch.cuda.Event | None]:
        here, there = self.devices[source], self.devices[target]
        tensors = [tensor.detach() for tensor in payload.tensors]
        event = None
        if here != there:
            tensors, event = self._copy(tensors, here, there)
        return Payload(tensors, payload.structure, payload.differentiable), event

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

    def _take(self, direction: str, stage: int, micro_batch: int) -> Payload:
        payload, event = self._mail.pop((direction, stage, micro_batch))
        if event is not None:
            stream = torch.cuda.current_stream(self.devices[stage])
            stream.wait_event(event)
            for tensor in payload.tensors:
                tensor.record_stream(stream)
        return payload
