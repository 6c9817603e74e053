"""Connections between two processes of one host: Unix sockets, with only the kernel in between."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe.pipeline.job.errors import LostPeer

if TYPE_CHECKING:
    from gpipe.pipeline.job.messages import Messenger

_MOST_PARTS = 256  # per system call, which would refuse more than 1,024


class Connection:
    """One end of a connection. All methods that send or receive raise LostPeer if the other end is gone.

    Buffers hold bytes. Received bytes never go into an empty buffer.

    Args:
        connected: a socket; this object closes it.
        rank: of the other process, in the job.
    """

    def __init__(self, connected: socket.socket, rank: int) -> None:
        self._socket, self._rank = connected, rank

    def send(self, parts: Sequence[Any], flags: int = 0) -> Sequence[Any]:
        """Wait until the socket has had room for some buffers or, with MSG_DONTWAIT, return those that are left."""
        try:
            while parts:
                count = self._socket.sendmsg(parts[:_MOST_PARTS], (), flags)
                parts = _drop(parts, count)
        except BlockingIOError:
            pass
        except OSError as error:
            raise LostPeer([self._rank], str(error)) from None
        return parts

    def receive(self, parts: Sequence[Any], flags: int = socket.MSG_WAITALL) -> Sequence[Any]:
        """Wait until some buffers are full or, with MSG_DONTWAIT, return those that are left."""
        try:
            while parts:
                count, *_ = self._socket.recvmsg_into(parts[:_MOST_PARTS], 0, flags)
                if not count:
                    raise ConnectionResetError("the connection was closed at its other end")
                parts = _drop(parts, count)
        except BlockingIOError:
            pass
        except OSError as error:
            raise LostPeer([self._rank], str(error)) from None
        return parts

    def cut(self) -> None:
        """End all waits at both ends."""
        with suppress(OSError):  # this end or the other is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _drop(parts: Sequence[Any], num_bytes: int) -> Sequence[Any]:
    """Return buffers without their first `num_bytes` bytes."""
    for position, part in enumerate(parts):
        if num_bytes < len(part):
            return [memoryview(part)[num_bytes:], *parts[position + 1 :]]
        num_bytes -= len(part)
    return ()


def offer(messenger: Messenger, peer: int) -> socket.socket | None:
    """Offer a connection to a rank of a group; return this end, or None if the two are on different hosts."""
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        path = ""
        with suppress(OSError):  # such as a path that is too long: then there is no connection
            # A folder that only this user can enter, and which is removed once the two are connected.
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpipe-")) + "/wire"
            listener.bind(path)
            listener.listen(1)
        messenger.send([path, _find_network()], peer)
        return listener.accept()[0] if messenger.receive(peer) else None


def accept(messenger: Messenger, peer: int) -> socket.socket | None:
    """Accept the connection that a rank of a group offers; return this end, or None if it is on another host."""
    (path, network), found = messenger.receive(peer), socket.socket(socket.AF_UNIX)
    try:
        found.connect(path if network == _find_network() else "")
    except OSError:  # the path is one of another host
        found.close()
        messenger.send(False, peer)
        return None
    messenger.send(True, peer)
    return found


def _find_network() -> str | None:
    """Return what distinguishes containers that share folders but not a network; None if that is unknown."""
    link = Path("/proc/self/ns/net")
    return str(link.readlink()) if link.is_symlink() else None
