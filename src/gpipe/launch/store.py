"""The key-value store in which the processes of a job meet."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=1)
"""How long to wait for an answer."""


def serve_store(address: str, port: int = 0) -> TCPStore:
    """Serve a key-value store at one address of this host.

    torch's own store listens at all addresses. It also asks a name server for the name of each process that connects,
    which takes 5 s if none answers: it sees IPv4 addresses as IPv6, and /etc/hosts does not have them in this form.

    The port 0 takes a free one.

    Raises:
        OSError: this host does not have the address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=descriptor)
