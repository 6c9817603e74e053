"""Receives payloads over a link, in a thread of its own."""

from __future__ import annotations

import json
import queue
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.pipeline.job.errors import PeerFailure
from gpipe.pipeline.payload import Payload
from gpipe.pipeline.transfer import MiniBatch
from gpipe.pipeline.wire.format import MessageFormat
from gpipe.pipeline.wire.link import SMALLEST_BYTES, Formats, Link, Says

_AHEAD = 2  # payloads that a receiver holds or asks for before the stage wants them


class _Received(NamedTuple):
    payload: Payload
    batch: MiniBatch
    arrived: torch.cuda.Event | None


class Receiver:
    """Receives payloads, a few of them before the stage wants them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._formats = Formats()
        self._stream = torch.cuda.Stream(link.device) if link.nccl is not None else None
        self._first: _Received | None = None
        self._steps: queue.SimpleQueue[tuple[bool, int | None] | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[_Received | Exception] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each payload that may be asked for
        for _ in range(_AHEAD):
            self._room.put(None)
        self._thread = threading.Thread(target=self._run, name=f"gpipe-receives-from-{link.peer}", daemon=True)
        self._thread.start()

    def start(self, *, training: bool, num_payloads: int | None) -> None:
        """Expect the payloads of a step; without their number, as many as the first one's mini-batch makes."""
        self._steps.put((training, num_payloads))

    def first(self) -> MiniBatch:
        """Wait for the first payload of a step, and return the mini-batch that it tells of."""
        self._first = self._next()
        return self._first.batch

    def receive(self) -> Payload:
        """Wait for the next payload.

        Raises:
            PeerFailure: the sender sent the cause of its failure instead.
            LostPeer: the connection is gone.
        """
        (payload, _, arrived), self._first = self._first or self._next(), None
        if arrived is not None:
            stream = torch.cuda.current_stream(self.link.device)
            stream.wait_event(arrived)
            for tensor in payload.tensors:
                tensor.record_stream(stream)
        return payload

    def fail(self) -> None:
        """End the thread, unless it waits for a message: that ends with the connection."""
        self._steps.put(None)

    def close(self) -> None:
        """End the thread, which waits for no message between two steps."""
        self._steps.put(None)
        with self.link.messenger.waiting_for(self.link.peer):
            self._thread.join()

    def _next(self) -> _Received:
        with self.link.messenger.waiting_for(self.link.peer):
            received = self._received.get()
        if isinstance(received, Exception):
            raise received
        self._room.put(None)
        return received

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.link.device)
        try:
            while (step := self._steps.get()) is not None:
                training, num_payloads = step
                self._formats.start(training=training)
                while num_payloads is None or self._formats.position < num_payloads:
                    self._room.get()
                    received = self._receive()
                    num_payloads = received.batch.num_microbatches
                    self._received.put(received)
                    del received  # the stage alone decides how long it lives
        except Exception as error:  # noqa: BLE001 - raised where the payload is asked for
            self._received.put(error)

    def _receive(self) -> _Received:
        found = self._formats.predicted()
        message = self._message(self.link.message_bytes(found))
        says = int(message[0])
        if says != Says.DATA:
            text = self._text(message)
            if says == Says.FAILURE:
                raise PeerFailure(**json.loads(text))
            found = MessageFormat.from_json(text)
            message = self._message(self.link.message_bytes(found))
        self._formats.advance(found)
        if self._stream is None:
            return _Received(found.unpack(message), found.batch, None)
        return _Received(self._receive_on_device(found), found.batch, self._stream.record_event())

    def _message(self, size: int) -> Tensor:
        messenger, peer = self.link.messenger, self.link.peer
        message = torch.empty(size, dtype=torch.uint8)
        messenger.wait(messenger.post_receive(message, peer, self.link.tag), peer)
        return message

    def _text(self, message: Tensor) -> bytes:
        data = message[:SMALLEST_BYTES].numpy().tobytes()
        length = int.from_bytes(data[1:9], "little")
        text = data[9 : 9 + length]
        if len(text) < length:
            text += self._message(length - len(text)).numpy().tobytes()
        return text

    def _receive_on_device(self, format_: MessageFormat) -> Payload:
        assert self.link.nccl is not None
        with torch.cuda.stream(self._stream):
            parts = format_.empty(self.link.device)
            for part in parts:
                if part.numel():  # as bytes: NCCL knows fewer types than torch
                    work = self.link.nccl.recv([part.view(torch.uint8)], 1 - self.link.nccl.rank(), 0)
                    work.wait()  # the stream waits, not the host
            return format_.payload(parts)
