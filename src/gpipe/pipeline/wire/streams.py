"""Streams of payloads between two stages' processes: one direction of one boundary, with a thread at each end."""

from __future__ import annotations

import queue
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.job.device_work import Delivery, DeviceWork
from gpipe.pipeline.job.errors import LostPeer, PipelineError
from gpipe.pipeline.job.messages import FRAME_BYTES, Messenger, frame_text
from gpipe.pipeline.job.sockets import Connection
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.nothing import NOTHING
from gpipe.pipeline.transfer import MiniBatch
from gpipe.pipeline.wire.format import EMPTY, PREFIX_BYTES, MessageFormat, flatten

HEADER = struct.Struct(f"<?Q?I{PREFIX_BYTES - 14}x")
"""Whether a format comes in place of a payload, and its length; whether the payload is of a training step, and its
position in that step."""

_LOOK_SECONDS = 0.001  # between two checks whether the step before has been sent
_AHEAD = 2  # payloads that a receiver holds or asks for before the stage needs them


Received: TypeAlias = tuple[Payload, MiniBatch, torch.cuda.Event | None]
"""A payload, the mini-batch that it belongs to, and the event after which it has arrived on the GPU."""


@dataclass(frozen=True)
class Link:
    """One direction of one boundary, seen from one end.

    Attributes:
        messenger: carries the messages.
        peer: the rank of the other end in the messenger's group.
        tag: the stream of this direction of this boundary.
        nccl: a group of the two ends, for this direction only; None on a CPU. With a communicator of its own, a
            direction's transfers are ordered by micro-batch on both ends, so they cannot block each other.
        device: where this end computes.
        device_work: notes what the device waits for.
        connection: to the other end, if both are CPUs of one host; else None.
    """

    messenger: Messenger
    peer: int
    tag: int
    nccl: dist.ProcessGroup | None
    device: torch.device
    device_work: DeviceWork
    connection: Connection | None = None

    def exchange(self, operation: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        """Send (dist.isend) or receive (dist.irecv) tensors over NCCL, all at once, on the device's current stream."""
        assert self.nccl is not None
        other = 1 - self.nccl.rank()
        operations = [dist.P2POp(operation, tensor, group=self.nccl, group_peer=other) for tensor in tensors]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()  # the stream waits, not the host


class Formats:
    """What one end of a stream predicts; the other end, having seen the same messages, predicts the same."""

    def __init__(self) -> None:
        self._known: dict[bool, dict[int, MessageFormat]] = {True: {}, False: {}}  # by training, then by position
        self.training = True
        self.position = 0  # of the next message in its step

    def start(self, *, training: bool) -> None:
        """Begin a step."""
        self.training, self.position = training, 0

    def prefix(self) -> bytes:
        """Return the prefix of the next data message."""
        return _make_prefix(self.training, self.position)

    def check_prefix(self, message: Any) -> None:
        """Refuse the prefix of a data message that is not the next one of this end's step."""
        if message != self.prefix():
            raise PipelineError(
                "the neighbour sent a payload of another step, or of training for evaluation; every process must make "
                "the same calls to the pipeline, in the same order"
            )

    def predict(self) -> MessageFormat:
        """Return the format that the next message should have."""
        known = self._known[self.training]
        return known.get(self.position) or known.get(self.position - 1, EMPTY)

    def advance(self, found: MessageFormat) -> None:
        """Note the format of the message, and move to the next."""
        self._known[self.training][self.position] = found
        self.position += 1


@cache
def _make_prefix(training: bool, position: int) -> bytes:
    return HEADER.pack(False, 0, training, position)


class _End(ABC):
    """One end of a stream, whose thread, if it needs one, does one piece of work after another until one fails."""

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self._formats = Formats()
        self._stream = torch.cuda.Stream(link.device) if link.nccl is not None else None
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._num_left, self._num_done = 0, 0  # pieces of work left to the thread, and how many of them are done
        self._name = f"gpipe-{name}-{link.peer}"
        self.threads: list[threading.Thread] = []

    def _leave(self, work: Callable[[], object]) -> None:
        """Leave a piece of work to the thread."""
        if not self.threads:
            self.threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self.threads[0].start()
        self._num_left += 1
        self._work.put(work)

    def end(self) -> None:
        """End the thread after its work; if it waits for a message that never comes, it ends with the connection."""
        self._work.put(None)

    def close(self) -> None:
        """End the thread, and wait until its work is done."""
        self.end()
        with self.link.messenger.waiting_for(self.link.peer):
            for thread in self.threads:
                thread.join()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.link.device)
        try:
            while (work := self._work.get()) is not None:
                work()
                self._num_done += 1
                del work  # and the payload in it, before waiting for more
            return
        except Exception as error:  # noqa: BLE001 - it would be lost in this thread
            self._note(error)
        while self._work.get() is not None:  # drop the rest, without the error: its traceback may hold the pipeline
            pass

    @abstractmethod
    def _note(self, error: Exception) -> None:
        """Keep the error that ended the work, to raise it where the work is awaited."""


class Sender(_End):
    """Sends payloads one after another, and releases each when it has arrived."""

    def __init__(self, link: Link) -> None:
        self._error: Exception | None = None
        super().__init__(link, "sends-to")

    def start(self, *, training: bool) -> None:
        """Begin a step; before an evaluation, wait until all is sent: it gets no answers, and could fill the memory."""
        if not training and self._num_left > self._num_done:
            with self.link.messenger.waiting_for(self.link.peer):
                while self._num_left > self._num_done and self._error is None:
                    time.sleep(_LOOK_SECONDS)
        self._formats.start(training=training)

    def send(self, payload: Payload, batch: MiniBatch) -> None:
        """Send a payload, without waiting for anything.

        Raises:
            LostPeer: the connection was lost while an earlier payload was sent.
        """
        if self._error is not None:
            raise self._error
        predicted = self._formats.predict()
        found = MessageFormat.of(payload, batch, predicted)
        if found is not predicted:
            self._announce(found, predicted)
        self._send(found, payload)
        self._formats.advance(found)

    def _announce(self, found: MessageFormat, predicted: MessageFormat) -> None:
        self._leave(lambda: self._deliver(*frame_text(found.to_json())))

    def _send(self, found: MessageFormat, payload: Payload) -> None:
        """Send a payload in a format that the receiver expects now."""
        prefix = self._formats.prefix()
        content = [prefix] if self.link.nccl is not None else found.lay_out(prefix, payload)
        message = torch.frombuffer(bytearray().join(content), dtype=torch.uint8)  # a copy: the payload may change
        if self.link.nccl is None:
            self._leave(lambda: self._deliver(message))
            return
        parts = [flatten(*one) for one in zip(payload.tensors, found.layouts, strict=True)]
        if not self._formats.training:  # an evaluation does not wait until it has arrived, and its memory may change
            parts = [part.clone() for part in parts]
        ready = torch.cuda.current_stream(self.link.device).record_event()
        delivery = Delivery((self.link.messenger.ranks[self.link.peer],), ready)
        self.link.device_work.deliver(delivery)

        def send() -> None:
            self._deliver(message)
            self._send_on_device([part for part in parts if part.numel()], delivery)

        self._leave(send)

    def _note(self, error: Exception) -> None:
        self._error = error
        if not isinstance(error, LostPeer):
            self.link.messenger.watch.report_own(f"sending failed: {type(error).__name__}: {error}")

    def _deliver(self, *messages: Tensor) -> None:
        for message in messages:
            self.link.messenger.send_bytes(message, self.link.peer, self.link.tag)

    def _send_on_device(self, parts: Sequence[Tensor], delivery: Delivery) -> None:
        assert self.link.nccl is not None and self._stream is not None
        self._stream.wait_event(delivery.ready)
        with torch.cuda.stream(self._stream):
            for part in parts:
                part.record_stream(self._stream)
            self.link.exchange(dist.isend, parts)
        delivery.sent = self._stream.record_event()


class Receiver(_End):
    """Receives payloads, some of them before the stage needs them."""

    def __init__(self, link: Link) -> None:
        self._first: Received | None = None
        self._received: queue.SimpleQueue[Received | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)  # for payloads that may be asked for
        super().__init__(link, "receives-from")

    def start(self, *, training: bool, num_payloads: int | None) -> None:
        """Expect the payloads of a step; the first payload's mini-batch gives their number if it is not known."""
        self._leave(lambda: self._receive_step(training, num_payloads))

    def end(self) -> None:
        """End the thread after its work, even if it waits for the stage to take what has arrived."""
        self._room.release()
        super().end()

    def first(self) -> MiniBatch:
        """Wait for the first payload of a step, and return the mini-batch that it belongs to."""
        self._first = self._next()
        return self._first[1]

    def receive(self) -> Payload:
        """Wait for the next payload.

        Raises:
            LostPeer: the connection is gone.
        """
        (payload, _, arrived), self._first = self._first or self._next(), None
        if arrived is not None:
            stream = torch.cuda.current_stream(self.link.device)
            stream.wait_event(arrived)
            self.link.device_work.expect(arrived, self.link.messenger.ranks[self.link.peer])
            for tensor in payload.tensors:
                tensor.record_stream(stream)
        return payload

    def _next(self) -> Received:
        with self.link.messenger.waiting_for(self.link.peer) if self._received.empty() else NOTHING:
            received = self._received.get()
        if isinstance(received, Exception):
            raise received
        self._room.release()
        return received

    def _receive_step(self, training: bool, num_payloads: int | None) -> None:
        self._formats.start(training=training)
        while num_payloads is None or self._formats.position < num_payloads:
            self._room.acquire()
            received = self._receive()
            num_payloads = received[1].num_microbatches
            self._received.put(received)
            del received  # only the stage keeps it alive

    def _note(self, error: Exception) -> None:
        self._received.put(error)  # raised where the payload is asked for

    def _receive(self) -> Received:
        found = self._formats.predict()
        while isinstance(content := self._read(found), bytes):
            found = MessageFormat.from_json(content)
        self._formats.advance(found)
        return content

    def _read(self, format_: MessageFormat) -> Received | bytes:
        """Wait for the payload that should come in a format, or for the other format that comes in its place."""
        # Gloo accepts a shorter message, so the first one of a text fits any prediction.
        size = max(FRAME_BYTES, format_.num_bytes if self._stream is None else PREFIX_BYTES)
        message = self.link.messenger.receive_bytes(size, self.link.peer, self.link.tag)
        if message[0]:
            return self.link.messenger.receive_text(message, self.link.peer, self.link.tag)
        self._formats.check_prefix(message[:PREFIX_BYTES].numpy().data)
        if self._stream is None:
            return format_.unpack(message), format_.batch, None
        return self._receive_on_device(format_), format_.batch, self._stream.record_event()

    def _receive_on_device(self, format_: MessageFormat) -> Payload:
        assert self.link.nccl is not None
        with torch.cuda.stream(self._stream):
            parts = [layout.allocate(layout.num_elements, self.link.device) for layout in format_.layouts]
            # As bytes: NCCL knows fewer types than torch.
            self.link.exchange(dist.irecv, [part.view(torch.uint8) for part in parts if part.numel()])
            return format_.payload(parts)
