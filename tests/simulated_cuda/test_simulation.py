"""The simulated GPUs compute, and notice what real ones would punish only now and then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_cuda import programs
from tests.simulated_cuda.environment import run_new_python
from tests.simulated_cuda.machine import SANITIZER, Machine


def find_faults(machine: Machine, num_processes: int, program: Callable[..., Any], *args: Any) -> list[str]:
    answers = machine.attempt(num_processes, program, *args)
    assert not any(answer.error for answer in answers), answers
    return [fault for answer in answers for fault in answer.faults]


def call(rank: int, program: Callable[..., Any], options: dict[str, bool]) -> Any:
    return program(rank, **options)


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (programs.read_beside, {"waits": True}, ""),
        (programs.read_beside, {"waits": False}, r"race: sum on the stream made at programs.py:\d+ .* does not wait"),
        (programs.overwrite_beside, {"waits": True}, ""),
        (programs.overwrite_beside, {"waits": False}, "race: zero_ on the default stream of cuda:0 .* still in use on"),
        (programs.let_go, {"records": True, "waits": False}, ""),
        (programs.let_go, {"records": False, "waits": True}, ""),
        (programs.let_go, {"records": False, "waits": False}, "freed too early: memory of the default stream of cuda:"),
    ],
)
def test_a_use_that_nothing_orders_is_a_fault(
    program: Callable[..., Any], options: dict[str, bool], message: str, simulated: Machine
) -> None:
    faults = find_faults(simulated, 1, call, program, options)
    assert len(faults) == bool(message)
    assert all(re.match(message, fault) for fault in faults), faults


@pytest.mark.parametrize("waits", [True, False])
def test_what_arrives_over_nccl_must_be_waited_for(waits: bool, simulated: Machine) -> None:
    faults = find_faults(simulated, 2, call, programs.send, {"waits": waits})
    assert ("race: add on the default stream of cuda:1" in "".join(faults)) != waits


@pytest.mark.parametrize("connects", [True, False])
def test_a_communicator_must_be_made_before_it_is_used(connects: bool, simulated: Machine) -> None:
    faults = find_faults(simulated, 2, call, programs.send, {"waits": True, "connects": connects})
    assert ("a communicator is made in the midst of the work: ncclGroup" in "".join(faults)) != connects


def test_what_is_sent_arrives(simulated: Machine) -> None:
    assert simulated.run(2, call, programs.send, {"waits": True}) == [[1.0, 1.0], [1.0, 1.0]]


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(simulated: Machine) -> None:
    found = [simulated.run(1, call, programs.read_copy, {"waits": waits}) for waits in (True, False)]
    assert found == [[[1.0, 1.0]], [[0.0, 0.0]]]


def test_tensors_of_two_devices_do_not_mix(simulated: Machine) -> None:
    (message,) = simulated.run(1, programs.add_across)
    assert message.startswith("Expected all tensors to be on the same device, but found cuda:0, cuda:1")


def test_each_device_has_its_generator(simulated: Machine) -> None:
    ((first, other, again, on_cpu),) = simulated.run(1, programs.draw)
    assert first == other == on_cpu
    assert again != first


def test_kernels_copies_and_waits_are_counted(simulated: Machine) -> None:
    (counts,) = simulated.run(1, programs.count)
    assert counts == {
        "copies from the host": 1,
        "kernels on cuda:1": 2,
        "copies between devices": 1,
        "waits of default streams": 2,  # each device's for the other, around the copy
        "copies to the host": 1,
        "host synchronisations": 2,  # for the copy of memory that is not pinned, and for the numbers
        "exchanges waited for blindly": 0,
        "operations waited for blindly": 5,  # all but the waits
    }


def test_an_event_behind_a_kernel_that_hangs_does_not_come(simulated: Machine) -> None:
    assert simulated.run(1, programs.hang) == [[True, False, True, True, True]]


def test_whoever_asks_a_device_that_failed_hears_of_it(simulated: Machine) -> None:
    assert simulated.run(1, programs.fail) == [["CUDA error: unspecified launch failure"] * 3]


def test_torchs_own_sanitizer_hears_of_streams_and_events(tmp_path: Path) -> None:
    program = (
        "from tests.simulated_cuda.programs import overwrite_beside as overwrite\n"
        "overwrite(0, waits=True); print('waited'); overwrite(0, waits=False); print('raced')"
    )
    done = run_new_python("-c", program, folder=tmp_path, TORCH_CUDA_SANITIZER="1")
    assert done.returncode != 0 and done.stdout == "waited\n", done.stderr
    assert "CSAN detected a possible data race" in done.stderr


def test_the_sanitizer_watches_the_forks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SANITIZER, "1")
    machine = Machine(simulated=True)
    found = [machine.attempt(1, call, programs.overwrite_beside, {"waits": waits})[0].error for waits in (True, False)]
    machine.close()
    assert [error.splitlines()[-1:] for error in found] == [
        [], ["torch.cuda._sanitizer.CUDASanitizerErrors: detected 1 errors"]
    ]  # fmt: skip
