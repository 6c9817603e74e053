"""A GPU or a link that hangs or fails ends every process within the time-out and seconds, and is named."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_cuda.faults import (
    Ending,
    Trial,
    connect,
    find_timeouts,
    find_timeouts_of_links,
    save,
    train,
    train_and_save,
)
from tests.simulated_cuda.machine import Answer, Machine

pytestmark = pytest.mark.alone
TIMEOUT_SECONDS = 3.0
SECONDS = 5.0  # the contract's, after the time-out
WHERE = ("forward", "backward", "evaluation")


def endings(machine: Machine, *trials: Trial) -> list[tuple[Trial, dict[int, Ending]]]:
    """Return how each process of some trials of one mesh ended, by rank."""
    num_processes = trials[0].num_replicas * trials[0].num_stages
    answers = attempt_by_twos(machine, [(num_processes, train, trial) for trial in trials])
    return [
        (trial, check(found, trial.culprit if trial.fault.startswith("a peer stops") else None))
        for trial, found in zip(trials, answers, strict=True)
    ]


def attempt_by_twos(machine: Machine, calls: Sequence[tuple[int, Callable[..., Any], Any]]) -> list[list[Answer]]:
    """Run calls two at once: they mostly wait, but more of them would be late for their time-outs on two cores."""
    pairs = (machine.attempt_at_once(calls[i : i + 2], seconds=25) for i in range(0, len(calls), 2))
    return [answers for pair in pairs for answers in pair]


def check(answers: Sequence[Answer], mute: int | None) -> dict[int, Ending]:
    """Return how each process ended but the one that cannot say so; fail if one did not, or too late."""
    found = {rank: answer for rank, answer in enumerate(answers) if rank != mute}
    assert not [answer.error for answer in found.values() if answer.error], found
    for rank, answer in found.items():
        assert answer.value is not None, f"rank {rank} noticed nothing"
        assert answer.value.seconds < TIMEOUT_SECONDS + SECONDS, f"rank {rank}: {answer.value}"
    return {rank: answer.value for rank, answer in found.items()}


def test_a_kernel_that_hangs_ends_a_process_of_its_own(simulated: Machine) -> None:
    trials = [Trial(1, 0, "a kernel hangs", where, TIMEOUT_SECONDS) for where in WHERE]
    for trial, (ending,) in ((trial, found.values()) for trial, found in endings(simulated, *trials)):
        micro_batch = 3 if trial.where == "backward" else 0  # backwards run in reverse
        place = f"stage 0, micro-batch {micro_batch}, {trial.where}"
        assert f"{place}: the GPU has not finished it for 3 s" in ending.text, trial
        assert ending.stage == 0, trial


def test_a_kernel_that_hangs_is_named_by_all(simulated: Machine) -> None:
    places = itertools.product(WHERE, range(3))
    trials = [Trial(3, culprit, "a kernel hangs", where, TIMEOUT_SECONDS) for where, culprit in places]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            what, culprit = f"{trial}, rank {rank}: {ending}", trial.culprit
            assert ending.stage == culprit, what
            own = f"stage {culprit}, micro-batch" in ending.text and "GPU has not finished it for 3 s" in ending.text
            assert own or f"stage {culprit} (rank {culprit}, process " in ending.text, what


def test_a_kernel_that_fails_ends_all_with_its_place(simulated: Machine) -> None:
    places = itertools.product(WHERE, range(3))
    trials = [Trial(3, culprit, "a kernel fails", where, TIMEOUT_SECONDS) for where, culprit in places]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            what, culprit = f"{trial}, rank {rank}: {ending}", trial.culprit
            assert f"rank {culprit}, stage {culprit}, micro-batch" in ending.text, what
            assert "CUDA error: unspecified launch failure" in ending.text, what


def test_a_link_over_which_nothing_comes_is_named(simulated: Machine) -> None:
    places = ("forward", 0), ("forward", 1), ("backward", 2), ("evaluation", 1)
    trials = [Trial(3, culprit, "a link is cut", where, TIMEOUT_SECONDS) for where, culprit in places]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            what, culprit = f"{trial}, rank {rank}: {ending}", trial.culprit
            assert f"data that were sent from stage {culprit} (rank {culprit}, " in ending.text, what
            assert "have not arrived for 3 s; see the link between their GPUs" in ending.text, what


def test_a_peer_that_stops_before_it_sends_what_it_announced_is_named(simulated: Machine) -> None:
    places = ("forward", 0), ("backward", 2), ("evaluation", 1)
    trials = [Trial(3, culprit, "a peer stops", where, TIMEOUT_SECONDS) for where, culprit in places]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            what, culprit = f"{trial}, rank {rank}: {ending}", trial.culprit
            assert f"stage {culprit} (rank {culprit}, process " in ending.text, what
            assert "does not answer: stage" in ending.text, what


def names_culprit(ending: Ending, trial: Trial) -> bool:
    """Return whether a process says of the culprit that its GPU hangs, or that it does not answer."""
    replica, stage = divmod(trial.culprit, trial.num_stages)
    name = f"stage {stage} of replica {replica}" if trial.num_replicas > 1 else f"stage {stage}"
    own = f"rank {trial.culprit}, " in ending.text and "the GPU has not finished it for 3 s" in ending.text
    other = f"{name} (rank {trial.culprit}, process " in ending.text and "does not answer" in ending.text
    return (own or other) and ending.stage == stage


@pytest.mark.parametrize(
    ("num_stages", "places"),
    [
        (1, (("forward", 0), ("backward", 1), ("averaging", 0))),
        (2, (("forward", 1), ("backward", 2), ("averaging", 3))),
    ],
)
def test_a_fault_of_one_replica_is_named_by_all(
    num_stages: int, places: Sequence[tuple[str, int]], simulated: Machine
) -> None:
    trials = [
        Trial(num_stages, culprit, fault, where, TIMEOUT_SECONDS, num_replicas=2)
        for fault in ("a kernel hangs", "a kernel fails", "a peer stops at once")
        for where, culprit in places
    ]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            what, place = (
                f"{trial}, rank {rank}: {ending}",
                f"rank {trial.culprit}, stage {trial.culprit % num_stages}, ",
            )
            if trial.fault == "a kernel fails":
                assert place in ending.text and "CUDA error: unspecified launch failure" in ending.text, what
            else:
                assert names_culprit(ending, trial), what


def test_a_link_of_one_replica_over_which_nothing_comes_is_named(simulated: Machine) -> None:
    ends = {("forward", 0): (0, 1), ("backward", 1): (1, 0)}  # of replica 0, by where it is cut, and whose link it is
    trials = [Trial(2, culprit, "a link is cut", where, TIMEOUT_SECONDS, num_replicas=2) for where, culprit in ends]
    for (trial, found), (source, target) in zip(endings(simulated, *trials), ends.values(), strict=True):
        first, second = (rf"stage {rank} of replica 0 \(rank {rank}, process \d+ on \S+\)" for rank in (source, target))
        for rank, ending in found.items():
            pattern = f"data that were sent from {first} to {second} have not arrived for 3 s; see the link"
            assert re.search(pattern, ending.text), f"{trial}, rank {rank}: {ending}"


@pytest.mark.parametrize(("num_stages", "culprit", "ranks"), [(1, 1, (0, 1)), (2, 1, (1, 3))])
def test_a_link_between_replicas_over_which_nothing_comes_is_named(
    num_stages: int, culprit: int, ranks: Sequence[int], simulated: Machine
) -> None:
    fault = "the link to the other replica is cut"
    trial = Trial(num_stages, culprit, fault, "averaging", TIMEOUT_SECONDS, num_replicas=2)
    ((_, found),) = endings(simulated, trial)
    for rank, ending in found.items():
        names = (
            f"stage {num_stages - 1} of replica {i} \\(rank {one}, \\S+ \\d+ on \\S+\\)" for i, one in enumerate(ranks)
        )
        pattern = f"data that {' and '.join(names)} exchange have not arrived for 3 s; see the links between their GPUs"
        assert re.search(pattern, ending.text), f"rank {rank}: {ending}"


def test_a_kernel_that_hangs_in_an_exchange_of_replicas_is_named_by_all(simulated: Machine) -> None:
    exchanges = (
        ("forward", "norms", "nothing"), ("backward", "norms", "nothing"), ("update", "plain", "state"),
        ("forward", "plain", "weights"), ("backward", "plain", "weights"),
    )  # fmt: skip
    trials = [Trial(1, 0, "a kernel hangs", where, TIMEOUT_SECONDS, 2, *rest) for where, *rest in exchanges]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            assert names_culprit(ending, trial), f"{trial}, rank {rank}: {ending}"


def test_a_kernel_that_hangs_in_the_sum_of_tied_gradients_is_named_by_all(simulated: Machine) -> None:
    where = "sum of tied gradients"
    trials = [Trial(2, culprit, "a kernel hangs", where, TIMEOUT_SECONDS, model="tied") for culprit in range(2)]
    for trial, found in endings(simulated, *trials):
        for rank, ending in found.items():
            assert names_culprit(ending, trial), f"{trial}, rank {rank}: {ending}"


def test_a_copy_of_a_save_that_hangs_ends_the_training(simulated: Machine) -> None:
    (ending,) = simulated.run(1, save, TIMEOUT_SECONDS)
    assert "saving after step 0: the GPU has not copied the tensors to the host within 3 s" in ending.text
    assert ending.seconds < TIMEOUT_SECONDS + SECONDS


def test_a_fault_in_a_save_ends_all_with_its_place(simulated: Machine, tmp_path: Path) -> None:
    words = {
        "a kernel hangs": r"rank 1, .*saving after step \d+: the GPU has not copied the tensors to the host within 3 s",
        "a kernel fails": r"(?s)rank 1, stage 1, .*CUDA error: unspecified launch failure",
        "a link is cut": r"data that were sent from stage 1 \(rank 1, .* have not arrived for 3 s",
        "a peer stops": r"stage 1 \(rank 1, process .* does not answer",
    }
    given = [(3, train_and_save, (1, fault, TIMEOUT_SECONDS, tmp_path / fault)) for fault in words]
    for fault, answers in zip(words, attempt_by_twos(simulated, given), strict=True):
        for rank, ending in check(answers, 1 if fault == "a peer stops" else None).items():
            assert re.search(words[fault], ending.text), f"{fault}, rank {rank}: {ending}"


def test_a_peer_that_stops_while_communicators_are_made_is_named(simulated: Machine) -> None:
    answer, _ = simulated.attempt(2, connect, TIMEOUT_SECONDS, seconds=TIMEOUT_SECONDS + SECONDS)
    assert answer.value is not None, answer.error
    assert answer.value.text.startswith("stage 1 (rank 1, process ") and "does not answer" in answer.value.text


def test_nccl_itself_ends_a_transfer_that_the_watch_has_not_ended(simulated: Machine) -> None:
    assert simulated.run(2, find_timeouts_of_links) == [[70.0, 70.0]] * 2


@pytest.mark.parametrize(
    ("timeout_seconds", "compiles", "seconds"),
    [(7.0, False, 3600.0), (700.0, False, 7000.0), (7.0, True, 365 * 86400.0)],
)
def test_nccl_itself_ends_an_exchange_where_nothing_compiles(
    timeout_seconds: float, compiles: bool, seconds: float, simulated: Machine
) -> None:
    for found in simulated.run(4, find_timeouts, timeout_seconds, compiles):
        assert found.pop("ncclGroup") == [10 * timeout_seconds]  # of boundaries
        assert found == {name: [seconds] for name in ("ncclAllReduce", "ncclBroadcast", "ncclAllGather")}
