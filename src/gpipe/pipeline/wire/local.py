"""Streams between two processes of one host: a socket for each direction of a boundary.

The stage's own thread writes payloads into the socket and reads them from it: only the kernel lies between the two
stages. Tensors are sent from their own memory and received into it, as packing small ones takes longer than sending
them. Messages and formats are those of streams.py. A text is at least as long as the payload that it replaces, so that
one call reads either. What a socket has no room for is left to a thread: no stage waits for its neighbour to read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.transfer import MiniBatch
from gpipe.pipeline.wire.format import MessageFormat
from gpipe.pipeline.wire.streams import HEADER, Formats, Link, Mark, Sender


class LocalSender(Sender):
    """Sends payloads one after another."""

    def __init__(self, link: Link) -> None:
        assert link.connection is not None
        self._connection = link.connection
        super().__init__(link)

    def _announce(self, found: MessageFormat, predicted: MessageFormat) -> None:
        text = found.to_json()
        message = HEADER.pack(Mark.FORMAT, len(text), False, 0) + text
        self._deliver_at_once([message.ljust(predicted.num_bytes, b"\0")])

    def _send(self, found: MessageFormat, payload: Payload) -> None:
        self._deliver_at_once(found.lay_out(self._formats.prefix(), payload))

    def _deliver_at_once(self, parts: Sequence[Any]) -> None:
        if self._num_left == self._num_sent:
            parts = self._connection.send_at_once(parts)
        if parts:
            rest = b"".join(parts)  # a copy: what the payload lies in may change
            self._leave(lambda: self._connection.send(rest))


class LocalReceiver:
    """Receives payloads one after another."""

    threads: tuple[threading.Thread, ...] = ()

    def __init__(self, link: Link) -> None:
        assert link.connection is not None
        self.link = link
        self._connection = link.connection
        self._formats = Formats()
        self._first: tuple[Payload, MiniBatch] | None = None

    def start(self, *, training: bool, num_payloads: int | None) -> None:
        """Begin a step."""
        self._formats.start(training=training)

    def first(self) -> MiniBatch:
        """Wait for the first payload of a step, and return the mini-batch that it belongs to."""
        self._first = self._next()
        return self._first[1]

    def receive(self) -> Payload:
        """Wait for the next payload; raise what `Receiver.receive` raises."""
        (payload, _), self._first = self._first or self._next(), None
        return payload

    def end(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Close the connection."""
        self.link.disconnect()

    def _next(self) -> tuple[Payload, MiniBatch]:
        found = self._formats.predict()
        elements, parts = found.allocate()
        self._receive(parts)
        mark, size, *_ = HEADER.unpack_from(parts[0])
        if mark == Mark.FORMAT:
            text = bytearray().join(parts[1:])[:size]
            self._receive([rest] if (rest := bytearray(size - len(text))) else [])
            found = MessageFormat.from_json(bytes(text + rest))
            elements, parts = found.allocate()
            self._receive(parts)
        self._formats.check_prefix(parts[0])
        self._formats.advance(found)
        return found.payload(elements), found.batch

    def _receive(self, parts: Sequence[Any]) -> None:
        if left := self._connection.receive_at_once(parts):
            with self.link.messenger.waiting_for(self.link.peer):
                self._connection.receive(*left)
