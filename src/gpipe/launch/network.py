"""The network that the processes of a run reach each other by."""

import fcntl
import os
import socket
import struct

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def choose_interface() -> None:
    """Let Gloo and NCCL listen where the processes of this job are, and nowhere else.

    Where all are on this host, that is the loopback interface, whatever the environment says for jobs of many hosts.
    Else Gloo listens where the first host is reached from here, unless GLOO_SOCKET_IFNAME says where: by itself it
    listens at the address of this host's name, which on many systems is 127.0.1.1, where no other host finds it.
    MASTER_ADDR is the first host, which torchrun's processes have all reached. Where no interface of Linux has the
    address, as with IPv6, Gloo is left alone.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ[_GLOO] = os.environ[_NCCL] = _interface_of("127.0.0.1") or "lo0"  # macOS has that name
    elif _GLOO not in os.environ and (name := _interface_of(_address_towards(os.environ["MASTER_ADDR"]))) is not None:
        os.environ[_GLOO] = name


def _address_towards(host: str) -> str | None:
    """Return this host's address on the way to another one, or to itself; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def _interface_of(address: str | None) -> str | None:
    """Return the name of the interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(control, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none, or this is another system
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
