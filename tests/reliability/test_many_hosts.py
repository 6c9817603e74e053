"""Training over several hosts: the same bits as on one, and an end when a host is gone."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.reliability.hosts import TRAIN, Host, two_hosts
from tests.reliability.test_faults import GRACE_SECONDS, RUN, TIMEOUT_SECONDS, UNHURRIED_SECONDS, wait_for_file
from tests.support.listeners import listeners
from tests.support.program_server import Program
from tests.support.train_program import start

pytestmark = [pytest.mark.reliability, pytest.mark.xdist_group("hosts")]  # there is one cable
SHAPES = {
    "four stages": ("pipeline.num_stages=4",),
    "two replicas of two stages": ("pipeline.num_stages=2", "launch.num_replicas=2"),
}
UNHURRIED = (*(item for item in RUN if "num_stages" not in item), f"pipeline.timeout_seconds={UNHURRIED_SECONDS}")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


def listened_at(programs: list[Program]) -> set[str]:
    """Return the addresses at which programs listen until they end, the loopback interface's left out."""
    found: set[str] = set()
    while any(program.poll() is None for program in programs):
        found |= {str(at) for program in programs for at, _ in listeners(program.pid) if not at.is_loopback}
        time.sleep(0.02)
    return found


def results(run: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Return a run's last weights, averages and optimiser state, and what its log says of losses and norms."""
    (checkpoint,) = (run / "checkpoints").glob("step-*6")
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        kind = path.name.partition("-")[0]
        tensors |= {f"{kind}/{name}": tensor for name, tensor in load_file(path).items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "gradient_norm", "top1", "test/loss")
    return tensors, [{name: line[name] for name in kept if name in line} for line in lines if "epoch" in line]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_two_hosts_train_as_one_does(shape: tuple[str, ...], hosts: tuple[Host, Host], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    done = start(tmp_path / "one", *UNHURRIED, *shape, "launch.num_processes=4")
    assert done.returncode == 0, done.stderr
    arguments = (TRAIN, *UNHURRIED, *shape, "launch.num_processes=1")
    programs = [host.start(i, tmp_path / "two", *arguments) for i, host in enumerate(hosts)]
    assert listened_at(programs) == {host.address for host in hosts}
    for number, program in enumerate(programs):
        assert program.wait(200) == 0, (tmp_path / "two" / f"{number}.txt").read_text()
    expected, expected_log = results(tmp_path / "one" / "run")
    found, log = results(tmp_path / "two" / "run")
    assert found.keys() == expected.keys() and len(found) > 20
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert log == expected_log and len(log) > 6


REACH = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 2).close()
        print(port)
    except OSError:
        pass
"""
OPEN_TO_ALL = (
    "import socket; server = socket.create_server((str(), 0)); print(server.getsockname()[1], flush=True); input()"
)


def test_a_run_on_one_host_does_not_answer_another(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The other host tries all its ports, and one that is open on purpose."""
    control = hosts[0].run(tmp_path, sys.executable, "-c", OPEN_TO_ALL)
    assert control.stdout is not None
    open_port = int(control.stdout.readline())
    words = (*RUN, "trainer.max_steps=100000", "trainer.num_epochs=100000")
    (output := tmp_path / "output.txt").touch()
    program = Program(TRAIN, *words, folder=tmp_path, output=output, network=hosts[0].name)
    try:
        wait_for_file(tmp_path / "run" / "checkpoints" / "latest", 150)
        ports = {port for _, port in listeners(program.pid)} | {open_port}
        assert len(ports) > 4  # the store's, and those of three processes
        tried = hosts[1].run(tmp_path, sys.executable, "-c", REACH, hosts[0].address, *map(str, ports))
        assert [int(port) for port in tried.communicate(timeout=60)[0].split()] == [open_port]
    finally:
        for pid in hosts[0].processes():
            os.kill(pid, signal.SIGKILL)
        control.communicate()
        program.wait(60)


@pytest.mark.alone  # the promise is one of seconds
@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_is_gone_ends_the_run(gone: int, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Host 0 has the rendezvous, and the store where processes leave word; nobody hears of it when it goes."""
    shape = (*RUN, "pipeline.num_stages=4", "trainer.max_steps=100000", "trainer.num_epochs=100000")
    shape += (f"pipeline.timeout_seconds={TIMEOUT_SECONDS}",)
    programs = [host.start(i, tmp_path, TRAIN, *shape) for i, host in enumerate(hosts)]
    rest, agent = hosts[1 - gone], programs[1 - gone]
    try:
        wait_for_file(tmp_path / "run" / "checkpoints" / "latest", 150)
        hosts[gone].lose_power()
        damage = time.monotonic()
        while [pid for pid in rest.processes() if pid != agent.pid]:
            assert time.monotonic() < damage + TIMEOUT_SECONDS + GRACE_SECONDS, "processes go on"
            time.sleep(0.1)
        if gone == 1:
            assert agent.wait(60) == 1
        # torchrun talks to the rendezvous: where that is gone, it waits for the system to give the connection up.
    finally:
        for program in programs:
            if program.poll() is None:
                os.kill(program.pid, signal.SIGKILL)
            program.wait(60)
    said = (tmp_path / f"{1 - gone}.txt").read_text()
    cause = "the first host.*has not answered for 5 s" if gone == 0 else r"stage [23] \(rank [23], .*does not answer"
    assert re.search(f"error: .*{cause}", said), said
