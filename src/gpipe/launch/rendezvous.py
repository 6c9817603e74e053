"""How the processes of a job find each other, with no port open further than it has to be.

Nothing that another host sends is unpickled, unless it is signed with a secret of the job.
"""

import hmac
import os
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

LOOPBACK = "127.0.0.1"
SECRET = "GPIPE_JOB_SECRET"  # noqa: S105 - the name of a variable
_SHORTEST = 16  # characters
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


def signed() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes the rendezvous of `torchrun --rdzv-backend gpipe`; torchrun finds it by its entry point."""
    return _signed


def _signed(parameters: RendezvousParameters) -> DynamicRendezvousHandler:
    """Meet the other hosts as by c10d, at one address, and with all that is unpickled signed.

    Raises ValueError without a secret, and where this host's name leads to the loopback interface.
    """
    store = _meet(parameters)
    handler = create_handler(store, SignedBackend(store, parameters.run_id, _secret()), parameters)
    handler._create_tcp_store_server = _serve_processes  # type: ignore[method-assign, assignment]
    return handler


class SignedBackend(C10dRendezvousBackend):
    """torch's, which keeps the hosts' state as a pickle in a store; here, with a signature in front of it."""

    def __init__(self, store: Store, run_id: str, secret: str) -> None:
        super().__init__(store, run_id)
        self._signing_key = hmac.digest(secret.encode(), run_id.encode(), "sha256")

    @property
    def name(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "gpipe"

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state unless somebody was faster; return what is there now, and whether it is that one."""
        found = super().set_state(self._signature(state) + state, token)
        return None if found is None else (found[0], found[1], found[0] == state)

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        found = super()._decode_state(base64_state)
        if found is None:
            return None
        signature, state = found[0][:32], found[0][32:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                f"the rendezvous has a state that is not signed with this host's {SECRET}, expected the same secret on "
                "all hosts and nobody else at its port: set the variable alike, and see who reaches the port."
            )
        return state, found[1]

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._signing_key, state, "sha256")


def _secret() -> str:
    secret = os.environ.get(SECRET, "")
    if len(secret) < _SHORTEST:
        raise ValueError(
            f"the environment variable {SECRET} has {len(secret)} characters, expected {_SHORTEST} or more, the same "
            f"on all hosts: set it, as with export {SECRET}=$(openssl rand -hex 32), before torchrun starts."
        )
    return secret


def _meet(parameters: RendezvousParameters) -> TCPStore:
    """Serve the store in which the hosts meet, or join it: the host that the endpoint names serves it."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    is_told = parameters.get_as_bool("is_host")
    if _matches_machine_hostname(host) if is_told is None else is_told:
        try:
            return serve_store(_address(parameters.local_addr or host), port)
        except OSError:  # another torchrun of this host serves it
            if is_told:
                raise
    return TCPStore(host, port, is_master=False, timeout=_TIMEOUT)


def _serve_processes(host: str, port: int) -> TCPStore:
    """Serve the store of the processes, where the other hosts reach this one."""
    return serve_store(_address(host), port)


def _address(host: str) -> str:
    """Return the address of this host under one of its names."""
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if ip_address(address).is_loopback and host not in (address, "localhost"):
        raise ValueError(
            f"{host} leads to {address} on this host, expected an address at which the other hosts reach it: add "
            "--local-addr <its address> to torchrun."
        )
    return address
