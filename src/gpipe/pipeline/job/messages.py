"""Small JSON messages between the processes of a group, such as the parts of a gathered value."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.job.errors import LostPeer
from gpipe.pipeline.job.host_memory import allocate_on_host
from gpipe.pipeline.job.sockets import Connection, accept, offer
from gpipe.pipeline.job.watch import FOREVER, Watch

FRAME_BYTES = 512  # of the first message of a text
_LENGTH_BYTES = 8
_HEADER_BYTES = 1 + _LENGTH_BYTES  # in it, before the text: a one, and the text's length
CONTROL_TAG = 1  # of this module's messages; boundaries have higher tags


class Messenger:
    """Sends and receives JSON over a Gloo group, whatever backend carries the tensors.

    Messages between neighbours on one host, which are most, go over sockets instead. All methods that send, receive or
    wait raise LostPeer if the connection is gone.

    Values are gathered along the ranks, from the last one to the first, and then all go back the same way:

        rank 0  <- 1, 2 --  rank 1  <---- 2 --  rank 2      stages end a step from the last to the first
        rank 0  - 0, 1, 2 > rank 1  - 0, 1, 2 > rank 2      and begin the next one from the first to the last

    So the first stage, for which all wait between two steps, receives only one message and sends only one.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self.group, self.watch = group, watch
        self.ranks = dist.get_process_group_ranks(group)  # of the members, in the job
        self.rank, self.size = dist.get_group_rank(group, dist.get_rank()), group.size()
        self._connections: dict[int, Connection] = {}

    def connect_neighbours(self) -> None:
        """Send messages between neighbours on one host over sockets from now on; all ranks call it."""
        for peer in (self.rank - 1, self.rank + 1):  # the one before first: it waits until this one has connected
            if 0 <= peer < self.size and (connection := self.connect(peer, offers=peer > self.rank)) is not None:
                self._connections[peer] = connection

    def connect(self, peer: int, *, offers: bool) -> Connection | None:
        """Return this end of a new connection to a rank of the group, or None if that is on another host.

        One end `offers` it, the other does not. The watch can end its waits.
        """
        if (found := offer(self, peer) if offers else accept(self, peer)) is None:
            return None
        connection = Connection(found, self.ranks[peer])
        self.watch.connections.append(connection)
        return connection

    def send(self, value: Any, peer: int) -> None:
        """Send a value to a rank of the group, which receives it next or waits for it already."""
        self._send_text(_to_json(value), peer)

    def _send_text(self, text: bytes, peer: int) -> None:
        with self.waiting_for(peer):
            if (connection := self._connections.get(peer)) is not None:
                connection.send([len(text).to_bytes(_LENGTH_BYTES, "little") + text])
            else:
                for message in frame_text(text):
                    self.send_bytes(message, peer, CONTROL_TAG)

    def receive(self, peer: int) -> Any:
        """Wait for the next message of a rank of the group."""
        return json.loads(self._receive_text(peer))

    def _receive_text(self, peer: int) -> bytes:
        with self.waiting_for(peer):
            if (connection := self._connections.get(peer)) is None:
                return self.receive_text(self.receive_bytes(FRAME_BYTES, peer, CONTROL_TAG), peer, CONTROL_TAG)
            length = bytearray(_LENGTH_BYTES)
            connection.receive([length])
            text = bytearray(int.from_bytes(length, "little"))
            connection.receive([text])
            return bytes(text)

    def send_bytes(self, message: Tensor, peer: int, tag: int) -> None:
        """Send a contiguous CPU tensor, and wait until it has arrived."""
        with LostPeer.named([self.ranks[peer]]):
            self.group.send([message], peer, tag).wait(FOREVER)

    def receive_bytes(self, size: int, peer: int, tag: int) -> Tensor:
        """Wait for a message of at most `size` bytes."""
        message = allocate_on_host(size, dtype=torch.uint8)
        with LostPeer.named([self.ranks[peer]]):
            self.group.recv([message], peer, tag).wait(FOREVER)
        return message

    def receive_text(self, first: Tensor, peer: int, tag: int) -> bytes:
        """Return the text whose first message has arrived; wait for the rest, if there is any."""
        data = first[:FRAME_BYTES].numpy().tobytes()
        length = int.from_bytes(data[1:_HEADER_BYTES], "little")
        text = data[_HEADER_BYTES : _HEADER_BYTES + length]
        if len(text) < length:
            text += self.receive_bytes(length - len(text), peer, tag).numpy().tobytes()
        return text

    def waiting_for(self, peer: int) -> AbstractContextManager[None]:
        """Let the watch know, while the body runs, for which rank of the group this process waits."""
        return self.watch.waiting_for([self.ranks[peer]])

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        before, after = self.rank - 1, self.rank + 1
        whole = _to_json(value)
        if after < self.size:
            whole += b"," + self._receive_text(after)
        if self.rank == 0:
            whole = b"[" + whole + b"]"
        else:
            self._send_text(whole, before)
            whole = self._receive_text(before)
        if after < self.size:
            self._send_text(whole, after)
        found: list[Any] = json.loads(whole)
        return found


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def frame_text(text: bytes) -> list[Tensor]:
    """Return a text as a message of fixed size, which begins with a one, and another with the rest, if any."""
    data = b"\1" + len(text).to_bytes(_LENGTH_BYTES, "little") + text
    parts = [data[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0"), data[FRAME_BYTES:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]
