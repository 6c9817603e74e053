"""Boundary activations forward, gradients back, between processes of one stage each.

A payload is a header (its nesting, types, shapes, strides) and the tensors' memory. The header goes over Gloo, where it
is read on the host; the tensors go over Gloo from a CPU and over NCCL from a GPU. So shapes may change at any time, and
nobody declares them.

A thread for each direction of receiving reads the next header and posts the receive of its tensors while the stage
computes; another waits until what was sent has arrived, to let go of it.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.messages import Messenger, Tag, encode
from gpipe.pipeline.payload import Payload, Structure, structure_from_json
from gpipe.pipeline.transfer import MiniBatch

_RECEIVED_AHEAD = 2  # payloads waiting for the stage; more would hold memory without saving time


@dataclass(frozen=True)
class Link:
    """One direction of one boundary, seen from one end.

    Attributes:
        messenger: carries the headers.
        peer: the rank of the other end in the messenger's group.
        header_tag: the stream of headers.
        data_tag: the stream of tensors, on Gloo.
        nccl: a group of the two ends alone, for this direction alone; None on a CPU. With a communicator to itself a
            direction's transfers are ordered by micro-batch on both ends, so they cannot block each other.
        device: where this end computes.
    """

    messenger: Messenger
    peer: int
    header_tag: Tag
    data_tag: Tag
    nccl: dist.ProcessGroup | None
    device: torch.device


class _Sender:
    """Sends payloads and lets go of them when they have arrived."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.stream = torch.cuda.Stream(link.device) if link.nccl is not None else None
        self._sent: queue.SimpleQueue[list[tuple[dist.Work, Tensor]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._let_go, name=f"gpipe-sent-to-{link.peer}", daemon=True).start()

    def send(self, payload: Payload, batch: MiniBatch) -> None:
        tensors = [tensor.detach() for tensor in payload.tensors]
        layouts = tuple(
            (str(t.dtype).removeprefix("torch."), tuple(t.shape), _strides(t), wanted)
            for t, wanted in zip(tensors, payload.differentiable, strict=True)
        )
        self.link.messenger.send_frame(_header(payload.structure, layouts, batch), self.link.peer, self.link.header_tag)
        self._sent.put([(self._send(part), part) for part in (_flat(tensor) for tensor in tensors) if part.numel()])

    def close(self) -> None:
        self._sent.put(None)

    def _send(self, part: Tensor) -> dist.Work:
        if self.link.nccl is None:
            return self.link.messenger.post_send(part, self.link.peer, self.link.data_tag)
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.link.device))
        part.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            return self.link.nccl.send([part], _other(self.link.nccl), 0)

    def _let_go(self) -> None:
        while (works := self._sent.get()) is not None:
            try:
                while works:
                    work, _ = works.pop()
                    work.wait()
            except RuntimeError:
                return  # the peer is gone: the next receive from it says so


class _Receiver:
    """Receives the payloads of a step ahead of their use."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ready: queue.Queue[_Arrival | BaseException] = queue.Queue(_RECEIVED_AHEAD)
        self._peeked: _Arrival | None = None
        threading.Thread(target=self._serve, name=f"gpipe-from-{link.peer}", daemon=True).start()

    def start(self, num_payloads: int) -> None:
        """Receive that many payloads; 0: as many as the first one says."""
        self._steps.put(num_payloads)

    def peek(self) -> MiniBatch:
        """Wait for the first payload of a step and return the mini-batch that it belongs to."""
        self._peeked = self._next()
        return self._peeked.batch

    def receive(self) -> Payload:
        arrival, self._peeked = self._peeked or self._next(), None
        for work in arrival.works:
            self.link.messenger.wait(work, self.link.peer)
        if arrival.event is not None:
            stream = torch.cuda.current_stream(self.link.device)
            stream.wait_event(arrival.event)
            for tensor in arrival.payload.tensors:
                tensor.record_stream(stream)
        return arrival.payload

    def close(self) -> None:
        self._steps.put(-1)

    def _next(self) -> _Arrival:
        arrival = self._ready.get()
        if isinstance(arrival, BaseException):
            raise arrival
        return arrival

    def _serve(self) -> None:
        stream = torch.cuda.Stream(self.link.device) if self.link.nccl is not None else None
        try:
            while (count := self._steps.get()) is not None and count >= 0:
                self._receive_step(count, stream)
        except BaseException as error:  # noqa: BLE001 - handed to the stage, which raises it
            self._ready.put(error)

    def _receive_step(self, count: int, stream: torch.cuda.Stream | None) -> None:
        link = self.link
        received = 0
        posted = link.messenger.post_receive(link.peer, link.header_tag)
        while True:
            header = link.messenger.finish_receive(posted, link.peer, link.header_tag)
            batch = MiniBatch(*header[2])
            received += 1
            more = received < (count or batch.num_microbatches)
            if more:
                posted = link.messenger.post_receive(link.peer, link.header_tag)
            self._ready.put(self._post(header, batch, stream))
            if not more:
                return

    def _post(self, header: Any, batch: MiniBatch, stream: torch.cuda.Stream | None) -> _Arrival:
        structure, layouts, _ = header
        link = self.link
        with torch.cuda.stream(stream):  # does nothing for None
            tensors = [_empty(dtype, shape, strides, link.device) for dtype, shape, strides, _ in layouts]
            parts = [part for part in (_flat(tensor) for tensor in tensors) if part.numel()]
            works: list[dist.Work] = []
            event = None
            if link.nccl is None:
                works = [link.messenger.post_receive_tensor(part, link.peer, link.data_tag) for part in parts]
            else:
                for work in [link.nccl.recv([part], _other(link.nccl), 0) for part in parts]:
                    work.wait()  # makes the stream wait, not the host
                event = torch.cuda.Event()
                event.record(stream)
        payload = Payload(tensors, structure_from_json(structure), [wanted for *_, wanted in layouts])
        return _Arrival(payload, batch, works, event)


@dataclass(slots=True)
class _Arrival:
    payload: Payload
    batch: MiniBatch
    works: list[dist.Work]
    event: torch.cuda.Event | None


class ProcessTransfer:
    """The transfer of one stage that has a process to itself.

    Args:
        previous: links to the stage before: receiving forward, sending backward; None in the first stage.
        following: links to the stage after: sending forward, receiving backward; None in the last stage.
    """

    def __init__(self, previous: tuple[Link, Link] | None, following: tuple[Link, Link] | None) -> None:
        self._inputs = _Receiver(previous[0]) if previous else None
        self._input_gradients = _Sender(previous[1]) if previous else None
        self._outputs = _Sender(following[0]) if following else None
        self._output_gradients = _Receiver(following[1]) if following else None
        self._batch = MiniBatch(0, 0)

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step; behind the first stage, wait for the first boundary input, which tells the mini-batch."""
        if self._inputs is not None:
            self._inputs.start(0)
            batch = self._inputs.peek()
        assert batch is not None
        self._batch = batch
        if training and self._output_gradients is not None:
            self._output_gradients.start(batch.num_microbatches)
        return batch

    def send_forward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send a boundary output to the process of the next stage, without waiting."""
        assert self._outputs is not None
        self._outputs.send(payload, self._batch)

    def receive_forward(self, stage: int, micro_batch: int) -> Payload:
        """Wait for the boundary input of this process's stage."""
        assert self._inputs is not None
        return self._inputs.receive()

    def send_backward(self, stage: int, micro_batch: int, payload: Payload) -> None:
        """Send gradients to the process of the previous stage, without waiting."""
        assert self._input_gradients is not None
        self._input_gradients.send(payload, self._batch)

    def receive_backward(self, stage: int, micro_batch: int) -> list[Tensor | None]:
        """Wait for the gradients of this process's boundary outputs."""
        assert self._output_gradients is not None
        return list(self._output_gradients.receive().value())

    def reset(self) -> None:
        """Do nothing: after a failure the streams are out of step for good, and the engine refuses to go on."""

    def close(self) -> None:
        """End the threads, once they have finished what is under way."""
        for end in (self._inputs, self._input_gradients, self._outputs, self._output_gradients):
            if end is not None:
                end.close()


@functools.lru_cache(maxsize=256)
def _header(structure: Structure, layouts: tuple[Any, ...], batch: MiniBatch) -> Sequence[Tensor]:
    return encode([structure, layouts, batch])


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides to rebuild a tensor with, None for those of a contiguous one.

    The next layer's kernels, and so the last bits of its result, can depend on them: a channels-last tensor must arrive
    as one, an expanded one too.
    """
    strides = tuple(tensor.stride())
    expected = 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride != expected:
                return None  # holes or overlaps: a contiguous copy travels
            expected *= size
    contiguous = tuple(math.prod(tensor.shape[d + 1 :]) for d in range(tensor.ndim))
    return None if strides == contiguous else strides


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as bytes, in the order in which it lies there; a view where that is possible."""
    if _strides(tensor) is None:
        flat = tensor.contiguous().view(-1)
    else:
        distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride > 0)
        flat = tensor.as_strided((distinct if tensor.numel() else 0,), (1,))
    return flat.view(torch.uint8)


def _empty(dtype: str, shape: list[int], strides: list[int] | None, device: torch.device) -> Tensor:
    kind = getattr(torch, dtype)
    if strides is None:
        return torch.empty(shape, dtype=kind, device=device)
    return torch.empty_strided(shape, strides, dtype=kind, device=device)


def _other(pair: dist.ProcessGroup) -> int:
    return 1 - pair.rank()
