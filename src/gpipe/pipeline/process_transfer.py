"""Boundary activations forward, gradients back, between processes of one stage each.

Both ends of a stream predict the format of its next message: that of the same micro-batch in the step before. While the
prediction holds, a payload is one message of known size, whose receive is posted ahead and arrives while the stage
computes. A sender whose payload has another format says so in a short message, which fits any receive, and sends the
payload in the next. So shapes may change at any time, and nobody declares them.

    sender     F0 [notice][data]  F1 [data]  F2 [data] ...     the first step: formats are new
    sender     F0 [data]          F1 [data]  F2 [data] ...     every step after it

The messages go over Gloo from host to host. Between GPUs they carry no data: the tensors follow over NCCL.
"""

from __future__ import annotations

import json
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.failure import PeerFailure
from gpipe.pipeline.message_format import NOTHING, PREFIX_BYTES, MessageFormat, flat
from gpipe.pipeline.messages import Messenger, Tag
from gpipe.pipeline.payload import Payload
from gpipe.pipeline.transfer import MiniBatch
from gpipe.pipeline.watch import FOREVER

_SMALLEST_BYTES = 512  # of a message, so that a notice usually fits into one
_LETTING_GO = 4  # sent messages are let go of in groups: waking a thread for each would cost more than their memory


class _Says(IntEnum):
    """The first byte of a message."""

    DATA = 0  # the payload follows, in the predicted format
    NOTICE = 1  # the payload's format follows, and then the payload in a message of its own
    FAILURE = 2  # the cause follows; there will be no further message


@dataclass(frozen=True)
class Link:
    """One direction of one boundary, seen from one end.

    Attributes:
        messenger: carries the messages.
        peer: the rank of the other end in the messenger's group.
        tag: the stream of this direction.
        nccl: a group of the two ends alone, for this direction alone; None on a CPU. With a communicator to itself a
            direction's transfers are ordered by micro-batch on both ends, so they cannot block each other.
        device: where this end computes.
    """

    messenger: Messenger
    peer: int
    tag: Tag
    nccl: dist.ProcessGroup | None
    device: torch.device

    def message_bytes(self, format_: MessageFormat) -> int:
        """Return the size of a message of a format."""
        return max(_SMALLEST_BYTES, format_.offsets[-1] if self.nccl is None else PREFIX_BYTES)


class _Formats:
    """What one end of a stream predicts; the other end, having seen the same messages, predicts the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, int], MessageFormat] = {}
        self._training = True
        self.position = 0  # of the next message in its step

    def start(self, *, training: bool) -> None:
        self._training, self.position = training, 0

    def predicted(self) -> MessageFormat:
        before = self._known.get((self._training, self.position - 1), NOTHING)
        return self._known.get((self._training, self.position), before)

    def advance(self, found: MessageFormat) -> None:
        self._known[self._training, self.position] = found
        self.position += 1


class _Sender:
    """Sends payloads and lets go of them when they have arrived."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.formats = _Formats()
        self._stream = torch.cuda.Stream(link.device) if link.nccl is not None else None
        self._works: list[tuple[dist.Work, Tensor]] = []
        self._sent: queue.SimpleQueue[list[tuple[dist.Work, Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._let_go, name=f"gpipe-sent-to-{link.peer}", daemon=True)
        self._thread.start()

    def start(self, *, training: bool) -> None:
        self.formats.start(training=training)
        self._hand_over()

    def send(self, payload: Payload, batch: MiniBatch) -> None:
        found, predicted = MessageFormat.of(payload, batch), self.formats.predicted()
        if found != predicted:
            self._post_text(_Says.NOTICE, found.to_json())
        message = torch.empty(self.link.message_bytes(found), dtype=torch.uint8)
        message[0] = _Says.DATA
        if self.link.nccl is None:
            found.pack(payload, message)
        self._post(message)
        if self.link.nccl is not None:
            self._send_on_device(payload, found)
        self.formats.advance(found)
        if len(self._works) >= _LETTING_GO or self.formats.position == batch.num_microbatches:
            self._hand_over()

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the receiver why no payload will come."""
        with suppress(RuntimeError):  # a peer that is gone needs no telling
            self._post_text(_Says.FAILURE, json.dumps(failure).encode())
        self._hand_over()
        self._sent.put(None)

    def close(self) -> None:
        self._hand_over()
        self._sent.put(None)
        with self.link.messenger.waiting_for(self.link.peer):
            self._thread.join()

    def _post(self, message: Tensor) -> None:
        self._works.append((self.link.messenger.post_send(message, self.link.peer, self.link.tag), message))

    def _post_text(self, says: _Says, text: bytes) -> None:
        data = bytes([says]) + len(text).to_bytes(8, "little") + text
        # Gloo receives a message that is shorter than expected, so this size fits whatever was predicted.
        for part in (data[:_SMALLEST_BYTES].ljust(_SMALLEST_BYTES, b"\0"), data[_SMALLEST_BYTES:]):
            if part:
                self._post(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def _send_on_device(self, payload: Payload, format_: MessageFormat) -> None:
        assert self.link.nccl is not None and self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.link.device))
        with torch.cuda.stream(self._stream):
            for tensor, layout in zip(payload.tensors, format_.layouts, strict=True):
                part = flat(tensor, layout)
                if part.numel():
                    part.record_stream(self._stream)
                    self._works.append((self.link.nccl.send([part], 1 - self.link.nccl.rank(), 0), part))

    def _hand_over(self) -> None:
        if self._works:
            self._sent.put(self._works)
            self._works = []

    def _let_go(self) -> None:
        while (works := self._sent.get()) is not None:
            with suppress(RuntimeError):  # the peer is gone: the next receive from it says so
                while works:
                    work, _ = works.pop(0)
                    if self.link.nccl is None:
                        work.wait(FOREVER)
                    else:
                        work.wait()
                    del work, _


class _Receiver:
    """Receives payloads, each posted while the one before is computed on."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.formats = _Formats()
        self._stream = torch.cuda.Stream(link.device) if link.nccl is not None else None
        self._posted: tuple[dist.Work, Tensor] | None = None
        self._remaining = 0
        self._first: tuple[Payload, MiniBatch] | None = None

    def start(self, *, training: bool, num_payloads: int) -> None:
        """Expect the payloads of a step; the number may be 1 until `expect` says it."""
        self.formats.start(training=training)
        self._remaining = num_payloads
        self._post_next()

    def first(self) -> MiniBatch:
        """Wait for the first payload of a step, and expect as many as the mini-batch that it tells of makes."""
        payload, batch = self._next(peek=True)
        self._first = payload, batch
        self._remaining = batch.num_microbatches - 1
        self._post_next()
        return batch

    def receive(self) -> Payload:
        if self._first is not None:
            (payload, _), self._first = self._first, None
            return payload
        return self._next()[0]

    def _post_next(self) -> None:
        if self._remaining > 0 and self._posted is None:
            self._posted = self._post(self.link.message_bytes(self.formats.predicted()))

    def _post(self, size: int) -> tuple[dist.Work, Tensor]:
        message = torch.empty(size, dtype=torch.uint8)
        return self.link.messenger.post_receive_tensor(message, self.link.peer, self.link.tag), message

    def _wait(self, posted: tuple[dist.Work, Tensor]) -> Tensor:
        work, message = posted
        self.link.messenger.wait(work, self.link.peer)
        return message

    def _next(self, *, peek: bool = False) -> tuple[Payload, MiniBatch]:
        assert self._posted is not None, "more payloads were asked for than the step has"
        found = self.formats.predicted()
        message = self._wait(self._posted)
        self._posted = None
        says = int(message[0])
        if says != _Says.DATA:
            text = self._text(message)
            if says == _Says.FAILURE:
                raise PeerFailure(**json.loads(text))
            found = MessageFormat.from_json(text)
            message = self._wait(self._post(self.link.message_bytes(found)))
        self.formats.advance(found)
        self._remaining -= 1
        payload = found.unpack(message) if self.link.nccl is None else self._receive_on_device(found)
        if not peek:
            self._post_next()
        return payload, found.batch

    def _text(self, message: Tensor) -> bytes:
        data = message[:_SMALLEST_BYTES].numpy().tobytes()
        length = int.from_bytes(data[1:9], "little")
        text = data[9 : 9 + length]
        if len(text) < length:
            text += self._wait(self._post(length - len(text))).numpy().tobytes()
        return text

    def _receive_on_device(self, format_: MessageFormat) -> Payload:
        assert self.link.nccl is not None and self._stream is not None
        with torch.cuda.stream(self._stream):
            parts = format_.empty(self.link.device)
            for part in parts:
                if part.numel():  # as bytes: NCCL knows fewer types than torch
                    work = self.link.nccl.recv([part.view(torch.uint8)], 1 - self.link.nccl.rank(), 0)
                    work.wait()  # the stream waits, not the host
            payload = format_.payload(parts)
        stream = torch.cuda.current_stream(self.link.device)
        stream.wait_stream(self._stream)
        for tensor in payload.tensors:
            tensor.record_stream(stream)
        return payload


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
        self._senders = [sender for sender in (self._outputs, self._input_gradients) if sender is not None]
        self._batch = MiniBatch(0, 0)

    def start(self, batch: MiniBatch | None, *, training: bool) -> MiniBatch:
        """Begin a step; behind the first stage, wait for the first boundary input, which tells the mini-batch."""
        for sender in self._senders:
            sender.start(training=training)
        if self._inputs is not None:
            self._inputs.start(training=training, num_payloads=1)
            batch = self._inputs.first()
        assert batch is not None
        self._batch = batch
        if training and self._output_gradients is not None:
            self._output_gradients.start(training=training, num_payloads=batch.num_microbatches)
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

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the neighbours why this stage sends nothing any more, and end the threads without waiting for them."""
        for sender in self._senders:
            sender.fail(failure)

    def reset(self) -> None:
        """Do nothing: after a failure the streams are out of step for good, and the engine refuses to go on."""

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the threads."""
        for sender in self._senders:
            sender.close()
