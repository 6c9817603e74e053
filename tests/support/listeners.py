"""What programs listen to, as the kernel tells it."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENS = "0A"


def listeners(pid: int) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Return the addresses and ports at which a process, and those that it started, wait for connections now."""
    return {listener for one in _descendants(pid) for listener in listeners_of(one)}


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):  # here and below: it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _descendants(int(child))


def listeners_of(pid: int) -> Iterator[tuple[IPv4Address | IPv6Address, int]]:
    """Yield the addresses and ports at which a process waits for connections now, without those that it started."""
    with suppress(OSError):
        inodes = {_inode(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and inode in inodes:
                    address, _, port = local.partition(":")
                    yield ip_address(_in_network_order(address)), int(port, 16)


def _inode(path: Path) -> str:
    """Return the inode of a descriptor that is a socket, something else for any other."""
    try:
        return str(path.readlink()).removeprefix("socket:[").removesuffix("]")
    except OSError:
        return ""


def _in_network_order(address: str) -> bytes:
    """Turn words of this machine, in hexadecimal digits, into the bytes of an address."""
    words = (int(address[start : start + 8], 16) for start in range(0, len(address), 8))
    return b"".join(socket.ntohl(word).to_bytes(4, "big") for word in words)
