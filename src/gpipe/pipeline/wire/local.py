"""Streams between two processes of one host: a socket for each direction of a boundary.

The stage's own thread writes payloads into the socket and reads them from it: only the kernel lies between the two
stages. Tensors are sent from their own memory and received into it, as packing small ones takes longer than sending
them. Messages and formats are those of streams.py. A text is at least as long as the payload that it replaces, so that
one call reads either. What a socket has no room for is left to a thread: no stage waits for its neighbour to read.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.wire.format import MessageFormat
from gpipe.pipeline.wire.streams import HEADER, Link, Received, Receiver, Sender


class LocalSender(Sender):
    """Sends payloads one after another."""

    def __init__(self, link: Link) -> None:
        assert link.connection is not None
        self._connection = link.connection
        super().__init__(link)

    def _announce(self, found: MessageFormat, predicted: MessageFormat) -> None:
        text = found.to_json()
        message = HEADER.pack(True, len(text), False, 0) + text
        self._deliver_at_once([message.ljust(predicted.num_bytes, b"\0")])

    def _send(self, found: MessageFormat, payload: Payload) -> None:
        self._deliver_at_once(found.lay_out(self._formats.prefix(), payload))

    def _deliver_at_once(self, parts: Sequence[Any]) -> None:
        if self._num_left == self._num_done:
            parts = self._connection.send(parts, socket.MSG_DONTWAIT)
        if parts:
            rest = b"".join(parts)  # a copy: what the payload lies in may change
            self._leave(lambda: self._connection.send([rest]))


class LocalReceiver(Receiver):
    """Receives payloads one after another."""

    def __init__(self, link: Link) -> None:
        assert link.connection is not None
        self._connection = link.connection
        super().__init__(link)

    def start(self, *, training: bool, num_payloads: int | None) -> None:
        """Begin a step."""
        self._formats.start(training=training)

    _next = Receiver._receive

    def _read(self, format_: MessageFormat) -> Received | bytes:
        elements, parts = format_.allocate()
        self._fill(parts)
        if parts[0][0]:
            _, size, *_ = HEADER.unpack_from(parts[0])
            text = bytearray().join(parts[1:])[:size]
            rest = bytearray(size - len(text))
            self._fill([rest] if rest else [])
            return bytes(text + rest)
        self._formats.check_prefix(parts[0])
        return format_.payload(elements), format_.batch, None

    def _fill(self, parts: Sequence[Any]) -> None:
        if left := self._connection.receive(parts, socket.MSG_DONTWAIT):
            with self.link.messenger.waiting_for(self.link.peer):
                self._connection.receive(left)
