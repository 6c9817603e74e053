"""Small JSON messages between the processes of a group: reports, gathered values, causes of failure."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe.pipeline.job.errors import LostPeer, PeerFailure, PipelineError
from gpipe.pipeline.job.watch import FOREVER, Watch

FRAME_BYTES = 512  # of a message's first part, which holds the length of the rest
_LENGTH_BYTES = 4


class Tag(IntEnum):
    """Keeps the streams of messages between two processes apart; within a stream the order is kept."""

    CONTROL = 1
    FORWARD = 2
    BACKWARD = 3

    def of_boundary(self, number: int) -> int:
        """Return the tag of one direction of one boundary: two processes may have several boundaries in common."""
        return self + 2 * number


class Messenger:
    """Sends and receives JSON over a Gloo group, whatever backend carries the tensors.

    Sends do not block; what is sent is kept until it has surely arrived. All methods that send, receive or wait raise
    LostPeer where the connection is gone.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self.group, self._watch = group, watch
        self._ranks = dist.get_process_group_ranks(group)  # of the members, in the job
        self.rank, self.size = dist.get_group_rank(group, dist.get_rank()), group.size()
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()

    def send(self, value: Any, peer: int) -> None:
        """Start sending a value to a rank of the group."""
        self._send_frame(_encode(value), peer)

    def _send_frame(self, frame: Sequence[Tensor], peer: int) -> None:
        for part in frame:
            self._sent.append((peer, self.post_send(part, peer, Tag.CONTROL), part))
        # Gloo does not tell whether a send is done. Every answer of a peer means that older messages have arrived, so
        # with this many after it the oldest is not waited for in practice.
        self._let_go(256 * self.size)

    def flush(self) -> None:
        """Wait until everything that was sent has arrived: Gloo keeps it until the receiver asks for it."""
        self._let_go(0)

    def _let_go(self, num_kept: int) -> None:
        while len(self._sent) > num_kept:
            peer, work, _ = self._sent.popleft()
            with self.waiting_for(peer):
                self.wait(work, peer)

    def receive(self, peer: int) -> Any:
        """Wait for the next message of a rank of the group.

        Raises:
            PeerFailure: the peer sent the cause of its failure instead.
        """
        data = self._receive_bytes(FRAME_BYTES, peer)
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        body = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(body):
            body += self._receive_bytes(length - len(body), peer)
        value = json.loads(body)
        if isinstance(value, dict) and "failure" in value:
            raise PeerFailure(**value["failure"])
        return value

    def _receive_bytes(self, size: int, peer: int) -> bytes:
        part = torch.empty(size, dtype=torch.uint8)
        with self.waiting_for(peer):
            self.wait(self.post_receive(part, peer, Tag.CONTROL), peer)
        return part.numpy().tobytes()

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending a contiguous CPU tensor."""
        with LostPeer.named([self._ranks[peer]]):
            return self.group.send([tensor], peer, tag)

    def post_receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving into a contiguous CPU tensor."""
        with LostPeer.named([self._ranks[peer]]):
            return self.group.recv([tensor], peer, tag)

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for a send or receive."""
        with LostPeer.named([self._ranks[peer]]):
            work.wait(FOREVER)

    def waiting_for(self, peer: int) -> AbstractContextManager[None]:
        """Let the watch know, while a body runs, for which rank of the group this process waits."""
        return self._watch.waiting_for([self._ranks[peer]])

    def report(self, error: PipelineError) -> None:
        """Let the watch tell all processes of an error."""
        self._watch.report(error)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.rank > 0:
            self.send(value, 0)
            received: list[Any] = self.receive(0)
            return received
        mine = json.loads(json.dumps(value))  # what the others get: tuples become lists
        values = [mine] + [self.receive(peer) for peer in range(1, self.size)]
        return list(self.broadcast(values, 0))

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value of rank `source` on every rank."""
        if self.rank != source:
            return self.receive(source)
        self._send_to_others(value)
        return value

    def fail(self, failure: dict[str, Any]) -> None:
        """Tell every other rank why this one stops."""
        self._send_to_others({"failure": failure}, RuntimeError)  # a peer that is gone needs no telling

    def _send_to_others(self, value: Any, *ignored: type[Exception]) -> None:
        frame = _encode(value)
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(*ignored):
                    self._send_frame(frame, peer)


def _encode(value: Any) -> list[Tensor]:
    """Return a value's JSON as a frame of fixed size and, where it is longer, the rest."""
    body = json.dumps(value, separators=(",", ":")).encode()
    data = len(body).to_bytes(_LENGTH_BYTES, "little") + body
    parts = [data[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0"), data[FRAME_BYTES:]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]
