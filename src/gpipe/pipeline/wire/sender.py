"""Sends payloads over a link, from a thread of its own."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpipe.pipeline.job.errors import LostPeer, PipelineError
from gpipe.pipeline.payload import Payload
from gpipe.pipeline.transfer import MiniBatch
from gpipe.pipeline.wire.format import MessageFormat, flat
from gpipe.pipeline.wire.link import SMALLEST_BYTES, Formats, Link, Says


class Sender:
    """Sends payloads one after the other, each let go of when it has arrived."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._formats = Formats()
        self._stream = torch.cuda.Stream(link.device) if link.nccl is not None else None
        self._error: Exception | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"gpipe-sends-to-{link.peer}", daemon=True)
        self._thread.start()

    def start(self, *, training: bool) -> None:
        """Begin a step."""
        self._work.put(lambda: self._formats.start(training=training))

    def send(self, payload: Payload, batch: MiniBatch) -> None:
        """Send a payload, without waiting for anything.

        Raises:
            LostPeer: the connection was gone when an earlier one was to be sent.
        """
        if self._error is not None:
            raise self._error
        ready = None
        if self.link.nccl is not None:
            ready = torch.cuda.current_stream(self.link.device).record_event()
        self._work.put(lambda: self._send(payload, batch, ready))

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell the receiver why no payload will come, and end the thread."""
        self._work.put(lambda: self._send_text(Says.FAILURE, json.dumps(failure).encode()))
        self._work.put(None)

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the thread."""
        self._work.put(None)
        with self.link.messenger.waiting_for(self.link.peer):
            self._thread.join()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self.link.device)
        while (work := self._work.get()) is not None:
            if self._error is None:
                try:
                    work()
                except LostPeer as lost:
                    self._error = lost
                except Exception as error:  # noqa: BLE001 - nobody else would hear of it
                    self._error = error
                    self.link.messenger.report(PipelineError(f"sending failed: {type(error).__name__}: {error}"))
            del work  # and the payload in it, before waiting for more

    def _send(self, payload: Payload, batch: MiniBatch, ready: torch.cuda.Event | None) -> None:
        found = MessageFormat.of(payload, batch)
        if found != self._formats.predicted():
            self._send_text(Says.NOTICE, found.to_json())
        message = torch.empty(self.link.message_bytes(found), dtype=torch.uint8)
        message[0] = Says.DATA
        if ready is None:
            found.pack(payload, message)
        self._deliver(message)
        if ready is not None:
            self._send_on_device(payload, found, ready)
        self._formats.advance(found)

    def _deliver(self, message: Tensor) -> None:
        messenger, peer = self.link.messenger, self.link.peer
        messenger.wait(messenger.post_send(message, peer, self.link.tag), peer)

    def _send_text(self, says: Says, text: bytes) -> None:
        data = bytes([says]) + len(text).to_bytes(8, "little") + text
        # Gloo receives a message that is shorter than expected, so this size fits whatever was predicted.
        for part in (data[:SMALLEST_BYTES].ljust(SMALLEST_BYTES, b"\0"), data[SMALLEST_BYTES:]):
            if part:
                self._deliver(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def _send_on_device(self, payload: Payload, format_: MessageFormat, ready: torch.cuda.Event) -> None:
        assert self.link.nccl is not None and self._stream is not None
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            for tensor, layout in zip(payload.tensors, format_.layouts, strict=True):
                part = flat(tensor, layout)
                if part.numel():
                    part.record_stream(self._stream)
                    self.link.nccl.send([part], 1 - self.link.nccl.rank(), 0).wait()  # the stream waits, not the host
