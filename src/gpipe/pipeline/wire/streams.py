"""A connection between two stages' processes: one direction of one boundary, and how its messages are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.wire.format import NOTHING, PREFIX_BYTES, MessageFormat

SMALLEST_BYTES = 512  # of a message, so that a notice usually fits into one


class Says(IntEnum):
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
        tag: the stream of this direction of this boundary.
        nccl: a group of the two ends alone, for this direction alone; None on a CPU. With a communicator to itself a
            direction's transfers are ordered by micro-batch on both ends, so they cannot block each other.
        device: where this end computes.
    """

    messenger: Messenger
    peer: int
    tag: int
    nccl: dist.ProcessGroup | None
    device: torch.device

    def message_bytes(self, format_: MessageFormat) -> int:
        """Return the size of a message of a format."""
        return max(SMALLEST_BYTES, format_.offsets[-1] if self.nccl is None else PREFIX_BYTES)


class Formats:
    """What one end of a stream predicts; the other end, having seen the same messages, predicts the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, int], MessageFormat] = {}
        self._training = True
        self.position = 0  # of the next message in its step

    def start(self, *, training: bool) -> None:
        """Begin a step."""
        self._training, self.position = training, 0

    def predicted(self) -> MessageFormat:
        """Return the format that the next message should have."""
        before = self._known.get((self._training, self.position - 1), NOTHING)
        return self._known.get((self._training, self.position), before)

    def advance(self, found: MessageFormat) -> None:
        """Note the format that it had."""
        self._known[self._training, self.position] = found
        self.position += 1
