"""A GPU or a link that hangs or fails ends every process within the time-out and seconds, and is named."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulated_cuda.faults import Ending, connect, find_timeouts, save, train, train_and_save
from tests.simulated_cuda.machine import Answer, Machine

pytestmark = pytest.mark.alone
TIMEOUT_SECONDS = 3.0
SECONDS = 5.0  # the contract's, after the time-out
WHERE = ("forward", "backward", "evaluation")


def endings(machine: Machine, num_stages: int, culprit: int, fault: str, where: str) -> dict[int, Ending]:
    """Return how each process ended, by rank; fail if one did not."""
    answers = machine.attempt(num_stages, train, num_stages, culprit, fault, where, TIMEOUT_SECONDS, seconds=20)
    return check(answers, culprit if fault == "a peer stops" else None)


def check(answers: Sequence[Answer], mute: int | None) -> dict[int, Ending]:
    """Return how each process ended but the one that cannot say so; fail if one did not, or too late."""
    found = {rank: answer for rank, answer in enumerate(answers) if rank != mute}
    assert not [answer.error for answer in found.values() if answer.error], found
    for rank, answer in found.items():
        assert answer.value is not None, f"rank {rank} noticed nothing"
        assert answer.value.seconds < TIMEOUT_SECONDS + SECONDS, f"rank {rank}: {answer.value}"
    return {rank: answer.value for rank, answer in found.items()}


@pytest.mark.parametrize("where", WHERE)
def test_a_kernel_that_hangs_ends_a_process_of_its_own(where: str, simulated: Machine) -> None:
    ending = endings(simulated, 1, 0, "a kernel hangs", where)[0]
    micro_batch = 3 if where == "backward" else 0  # backwards run in reverse
    assert f"stage 0, micro-batch {micro_batch}, {where}: the GPU has not finished it for 3 s" in ending.text
    assert ending.stage == 0


@pytest.mark.parametrize(("where", "culprit"), list(itertools.product(WHERE, range(3))))
def test_a_kernel_that_hangs_is_named_by_all(where: str, culprit: int, simulated: Machine) -> None:
    for rank, ending in endings(simulated, 3, culprit, "a kernel hangs", where).items():
        assert ending.stage == culprit, f"rank {rank}: {ending}"
        own = f"stage {culprit}, micro-batch" in ending.text and "the GPU has not finished it for 3 s" in ending.text
        assert own or f"stage {culprit} (rank {culprit}, process " in ending.text, f"rank {rank}: {ending}"


@pytest.mark.parametrize(("where", "culprit"), list(itertools.product(WHERE, range(3))))
def test_a_kernel_that_fails_ends_all_with_its_place(where: str, culprit: int, simulated: Machine) -> None:
    for rank, ending in endings(simulated, 3, culprit, "a kernel fails", where).items():
        assert f"rank {culprit}, stage {culprit}, micro-batch" in ending.text, f"rank {rank}: {ending}"
        assert "CUDA error: unspecified launch failure" in ending.text, f"rank {rank}: {ending}"


@pytest.mark.parametrize(("where", "culprit"), [("forward", 0), ("forward", 1), ("backward", 2), ("evaluation", 1)])
def test_a_link_over_which_nothing_comes_is_named(where: str, culprit: int, simulated: Machine) -> None:
    for rank, ending in endings(simulated, 3, culprit, "a link is cut", where).items():
        assert f"data that were sent from stage {culprit} (rank {culprit}, " in ending.text, f"rank {rank}: {ending}"
        assert "have not arrived for 3 s; see the link between their GPUs" in ending.text, f"rank {rank}: {ending}"


@pytest.mark.parametrize(("where", "culprit"), [("forward", 0), ("backward", 2), ("evaluation", 1)])
def test_a_peer_that_stops_before_it_sends_what_it_announced_is_named(
    where: str, culprit: int, simulated: Machine
) -> None:
    for rank, ending in endings(simulated, 3, culprit, "a peer stops", where).items():
        assert f"stage {culprit} (rank {culprit}, process " in ending.text, f"rank {rank}: {ending}"
        assert "does not answer: stage" in ending.text, f"rank {rank}: {ending}"


def test_a_copy_of_a_save_that_hangs_ends_the_training(simulated: Machine) -> None:
    (ending,) = simulated.run(1, save, TIMEOUT_SECONDS)
    assert "saving after step 0: the GPU has not copied the tensors to the host for 3 s" in ending.text
    assert ending.seconds < TIMEOUT_SECONDS + SECONDS


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a kernel hangs", r"rank 1, .*saving after step \d+: the GPU has not copied the tensors to the host for 3 s"),
        ("a kernel fails", r"(?s)rank 1, stage 1, .*CUDA error: unspecified launch failure"),
        ("a link is cut", r"data that were sent from stage 1 \(rank 1, .* have not arrived for 3 s"),
        ("a peer stops", r"stage 1 \(rank 1, process .* does not answer"),
    ],
)
def test_a_fault_in_a_save_ends_all_with_its_place(fault: str, words: str, simulated: Machine, tmp_path: Path) -> None:
    answers = simulated.attempt(3, train_and_save, 1, fault, TIMEOUT_SECONDS, tmp_path, seconds=20)
    for rank, ending in check(answers, 1 if fault == "a peer stops" else None).items():
        assert re.search(words, ending.text), f"rank {rank}: {ending}"


def test_a_peer_that_stops_while_communicators_are_made_is_named(simulated: Machine) -> None:
    answer, _ = simulated.attempt(2, connect, TIMEOUT_SECONDS, seconds=TIMEOUT_SECONDS + SECONDS)
    assert answer.value is not None, answer.error
    assert answer.value.text.startswith("stage 1 (rank 1, process ") and "does not answer" in answer.value.text


def test_nccl_itself_ends_a_transfer_that_the_watch_has_not_ended(simulated: Machine) -> None:
    assert simulated.run(2, find_timeouts) == [[70.0, 70.0]] * 2
