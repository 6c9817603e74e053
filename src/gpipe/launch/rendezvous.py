"""How the processes of a job find each other: the store they share, the interfaces they listen at, and who may join.

No port is open to more hosts than necessary. What another host sends is unpickled only if the job's secret signs it.
"""

import fcntl
import hmac
import os
import secrets
import socket
import struct
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.rendezvous import rendezvous

from gpipe._compat.torch_launch import is_this_host, serve_processes_with
from gpipe.launch.store import LOOPBACK, TIMEOUT, serve_store

SECRET = "GPIPE_JOB_SECRET"  # noqa: S105 - the name of a variable
_MIN_LENGTH = 16  # characters
_POLL_SECONDS = 0.02
_OTHERS_FACTOR = 1.2  # the first process times out before the others, because it knows which processes are missing
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def join_store(seconds: float) -> tuple[Store, int, int]:
    """Join the store of this process's job, which torchrun's variables describe; return its rank and their number too.

    Raises:
        TimeoutError: another process did not join within `seconds`, or a little more if this is not the first one.
    """
    if os.environ["RANK"] != "0":
        seconds *= _OTHERS_FACTOR
    timeout = timedelta(seconds=seconds)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        return share_fresh_part(store, rank, size, timeout), rank, size
    except DistStoreError:
        raise TimeoutError(
            f"process 0 did not join within {seconds:.1f} s: find out what delays it, or raise "
            "pipeline.timeout_seconds."
        ) from None


def share_fresh_part(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a part of a store that the processes of this try share, and that no earlier try has written to.

    torch's agent keeps its store when it restarts the processes. A new process may then read the address of an old one
    and fail to connect. The number of restarts does not help: hosts may count differently. So each process asks under a
    new random name, and the first process answers with the name of the part.

    Raises:
        TimeoutError: another process did not join in time.
    """
    own = secrets.token_hex(8)
    if rank != 0:
        store.set(f"asks/{rank}", own)
        part = store.get(f"answer/{own}").decode()  # waits for the answer
        store.set(f"{part}/{rank}", "knows")
        return PrefixStore(part, store)
    part, deadline = f"part-{own}", time.monotonic() + timeout.total_seconds()
    while unaware := [other for other in range(1, size) if not store.check([f"{part}/{other}"])]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the processes {unaware} did not join within {timeout.total_seconds():.1f} s: find out what delays "
                "them, or raise pipeline.timeout_seconds."
            )
        for other in unaware:
            if store.check([f"asks/{other}"]):  # if an old process asked, a new one will ask too
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", part)
        time.sleep(_POLL_SECONDS)
    return PrefixStore(part, store)


def choose_interface() -> None:
    """Make Gloo and NCCL listen only where the processes of this job are.

    If all processes are on this host, they listen at the loopback interface, whatever the environment says. Otherwise
    Gloo listens at the interface from which this host reaches the first one (MASTER_ADDR), unless GLOO_SOCKET_IFNAME
    names another. By default Gloo listens at the address of this host's name, which on many systems is 127.0.1.1, where
    no other host finds it. If no interface of Linux has the address, as with IPv6, Gloo keeps its default.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ[_GLOO] = os.environ[_NCCL] = _find_interface("127.0.0.1") or "lo0"  # macOS has that name
    elif (
        _GLOO not in os.environ
        and (name := _find_interface(_find_address_towards(os.environ["MASTER_ADDR"]))) is not None
    ):
        os.environ[_GLOO] = name


def _find_address_towards(host: str) -> str | None:
    """Return the address from which this host reaches a host, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def _find_interface(address: str | None) -> str | None:
    """Return the name of the interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(control, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address, or the system is not Linux
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


class OneHost(StaticTCPRendezvous):
    """The rendezvous of a job on one host, with a store on the loopback interface.

    torch's own store listens at all interfaces. Its c10d rendezvous also unpickles what it finds there.
    """

    def __init__(self) -> None:
        self._served = serve_store(LOOPBACK)
        seconds = round(TIMEOUT.total_seconds())
        super().__init__(LOOPBACK, self._served.port, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=seconds)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, which stays the same after a restart, and its address."""
        return RendezvousInfo(self._served, 0, 1, RendezvousStoreInfo(LOOPBACK, self._served.port))


def signed() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory of `torchrun --rdzv-backend gpipe`; torchrun finds it by its entry point."""
    return _make_signed


def _make_signed(parameters: RendezvousParameters) -> DynamicRendezvousHandler:
    """Meet the other hosts as c10d does, but listen at one address and sign all that is unpickled."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _MIN_LENGTH:
        raise ValueError(
            f"the environment variable {SECRET} has {len(secret)} characters, expected {_MIN_LENGTH} or more, the same "
            f"on all hosts: set it before torchrun starts, for example export {SECRET}=$(openssl rand -hex 32)."
        )
    store = _meet(parameters)
    handler = create_handler(store, SignedBackend(store, parameters.run_id, secret), parameters)
    # At the address where the other hosts reach this one.
    serve_processes_with(handler, lambda host, port: serve_store(_address(host), port))
    return handler


class SignedBackend(C10dRendezvousBackend):
    """torch's backend, which keeps the hosts' state as a pickle in a store, with a signature before each pickle."""

    def __init__(self, store: Store, run_id: str, secret: str) -> None:
        super().__init__(store, run_id)
        self._signing_key = hmac.digest(secret.encode(), run_id.encode(), "sha256")

    @property
    def name(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "gpipe"

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write a state unless another host was faster; return the state there now, and whether it is this one."""
        found = super().set_state(self._signature(state) + state, token)
        return None if found is None else (found[0], found[1], found[0] == state)

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        found = super()._decode_state(base64_state)
        if found is None:
            return None
        signature, state = found[0][:32], found[0][32:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                f"the rendezvous has a state that is not signed with this host's {SECRET}: set the same secret on all "
                "hosts, and make sure that no stranger reaches the port."
            )
        return state, found[1]

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._signing_key, state, "sha256")


def _meet(parameters: RendezvousParameters) -> TCPStore:
    """Serve or join the store in which the hosts meet: the host that the endpoint names serves it."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    is_told = parameters.get_as_bool("is_host")
    if is_this_host(host) if is_told is None else is_told:
        try:
            return serve_store(_address(parameters.local_addr or host), port)
        except OSError:  # another torchrun of this host serves it
            if is_told:
                raise
    return TCPStore(host, port, is_master=False, timeout=TIMEOUT)


def _address(host: str) -> str:
    """Return the address that one of this host's names resolves to."""
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if ip_address(address).is_loopback and host not in (address, "localhost"):
        raise ValueError(
            f"{host} resolves to {address}, which no other host can reach: add --local-addr to torchrun, with an "
            "address that the other hosts can reach."
        )
    return address
