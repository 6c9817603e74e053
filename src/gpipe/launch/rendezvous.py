"""How the processes of a job find each other, with no port open further than it has to be."""

import socket
import uuid
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=1)


def serve_store(address: str, port: int = 0) -> TCPStore:
    """Serve a key-value store at one of this host's addresses alone; torch's own listens at all of them.

    port: 0 takes one that is free. Raises OSError where this host does not have the address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=descriptor
    )


class OneHost(RendezvousHandler):
    """The rendezvous of an agent that is the only one: nobody to wait for, and a store on the loopback interface.

    torch's c10d rendezvous listens on all interfaces, and unpickles what it finds in its store.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store = serve_store(LOOPBACK)

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use the agent's store, instead of starting one on all interfaces."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, which is the same after a restart, and where the processes reach it."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "one_host"

    def get_run_id(self) -> str:
        """Return a name that no other run has."""
        return self._run_id

    def is_closed(self) -> bool:
        """Say that it is open: it ends with the agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else would come."""

    def num_nodes_waiting(self) -> int:
        """Say that no other host wants to join."""
        return 0

    def shutdown(self) -> bool:
        """Say that all is over: the store ends with the agent."""
        return True
