"""Two hosts on one machine: network namespaces with addresses of their own, and a cable between them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpipe.launch.rendezvous import SECRET
from tests.support.program_server import TORCHRUN, Program

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
PORT = 29400


@dataclass(frozen=True)
class Host:
    """A network namespace, and its end of the cable."""

    name: str
    interface: str
    address: str

    def start(self, number: int, folder: Path, *arguments: str) -> Program:
        """Start torchrun with two processes on this host, which is host `number`; 0 has the rendezvous.

        What it says goes to the file <number>.txt in the folder.
        """
        # An address is told that it is this host's own: in a namespace, the host's name does not lead to it.
        own = (
            "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "job", "--rdzv-backend", "gpipe", "--rdzv-endpoint",
            f"{FIRST_ADDRESS}:{PORT}", "--local-addr", self.address, "--rdzv-conf", f"is_host={int(number == 0)}",
        )  # fmt: skip
        output = folder / f"{number}.txt"
        output.touch()
        secret = {SECRET: "known to both hosts alone"}
        return Program(TORCHRUN, *own, *arguments, folder=folder, output=output, network=self.name, **secret)

    def run(self, folder: Path, *command: str) -> subprocess.Popen[str]:
        """Start a program on this host, whose output can be read."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pull_the_cable(self) -> None:
        """Take the link down: what is on its way is lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.interface, "down")

    def processes(self) -> list[int]:
        """Return the processes that run on this host."""
        found = _ip("netns", "pids", self.name)
        return [int(pid) for pid in found.split()]

    def lose_power(self) -> None:
        """Pull the cable and kill all processes."""
        self.pull_the_cable()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


FIRST_ADDRESS = "10.83.7.1"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts, and take them away with all that runs on them; skip the test where that is not allowed."""
    number = os.getpid()
    hosts = tuple(
        Host(f"gpipe{number}{end}", f"gp{number % 10**6}{end}", f"10.83.7.{i}") for i, end in ((1, "a"), (2, "b"))
    )
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    try:
        _ip("netns", "add", hosts[0].name)
    except (FileNotFoundError, PermissionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here ({error}): install iproute2, and allow them")
    try:
        _connect(*hosts)
        yield hosts
    finally:
        for host in hosts:
            for pid in host.processes() if host.name in _ip("netns", "list") else []:
                os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", host.name)


def _connect(first: Host, second: Host) -> None:
    _ip("netns", "add", second.name)
    _ip(
        "link", "add", first.interface, "netns", first.name, "type", "veth",
        "peer", "name", second.interface, "netns", second.name,
    )  # fmt: skip
    for host in (first, second):
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        for interface in ("lo", host.interface):
            _ip("-n", host.name, "link", "set", interface, "up")


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
