"""Copies of a tied parameter get the gradient that a single parameter would have, whatever processes they are in."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import gpipe
from gpipe.pipeline.shared.peers import Peers
from tests.pipeline.job import fresh_processes
from tests.support.process_pool import ProcessPool
from tests.support.tied_model import (
    MATRIX,
    TABLE,
    Case,
    Outcome,
    adamw,
    assert_bitwise_equal,
    assert_close,
    assert_copies_equal,
    loss,
    mini_batch,
    run,
    run_plain,
    sgd,
    tied_layers,
)

MODES = ("always", "except_last", "never")
CUTS = (
    ((3, 3), "gpipe", 1),
    ((1, 2, 2, 1), "gpipe", 1),
    ((3, 3), "1f1b", 1),
    ((1, 2, 2, 1), "1f1b", 1),
    ((3, 3), "split_gpipe", 1),
    ((1, 2, 2, 1), "zb_h1", 1),
    ((2, 1, 1, 2), "zb_v", 2),  # both ends of the table are in one process
    ((2, 1, 1, 2), "interleaved_1f1b", 2),  # the table's sum goes from one process to the other and back
)


def mesh_of(num_replicas: int = 1) -> Any:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage"))


def run_in_processes(rank: int, cases: list[Case], num_replicas: int = 1) -> list[Outcome]:
    mesh = mesh_of(num_replicas)
    return [run(case, mesh, num_replicas) for case in cases]


def test_the_sum_is_also_that_of_parameters_that_came_later() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    layers[2].weight = layers[0].weight
    pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, [2, 1], 2)
    found = []
    for _ in range(2):
        pipeline.train_step((torch.ones(4, 3), torch.zeros(4, 3)))
        assert torch.equal(layers[0].weight.grad, layers[2].weight.grad)
        found.append(layers[0].weight.grad)
        pipeline.layers.load_state_dict({k: v.clone() for k, v in pipeline.layers.state_dict().items()}, assign=True)
    assert torch.equal(*found)


def test_a_tied_parameter_that_is_gone_is_named() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    layers[2].weight = layers[0].weight
    pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, [2, 1], 2)
    nn.utils.parametrizations.weight_norm(layers[2])
    with pytest.raises(ValueError, match=r"^a tied parameter is gone from its layer: .* before the pipeline is built$"):
        pipeline.train_step((torch.ones(4, 3), torch.zeros(4, 3)))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(("partitions", "schedule", "stages_per_device"), [((6,), "gpipe", 1), *CUTS])
def test_gradients_and_updates_are_those_of_one_shared_parameter(
    partitions: tuple[int, ...], schedule: str, stages_per_device: int, optimizer: Any
) -> None:
    case = Case(partitions, schedule, stages_per_device, num_steps=5, zeroed=(1, 2, 4), optimizer=optimizer)
    found = run(case)
    assert_close(found, run_plain(case))
    assert_copies_equal([found])


@pytest.mark.parametrize(("partitions", "schedule", "stages_per_device"), CUTS)
def test_bits_do_not_depend_on_the_cut_the_mode_or_the_launch(
    partitions: tuple[int, ...], schedule: str, stages_per_device: int, processes: ProcessPool
) -> None:
    same = {"dropout": 0.3, "max_norm": 0.5, "device": "meta"}
    expected = run(Case(schedule="gpipe" if schedule.endswith("gpipe") else "1f1b", rematerialize="never", **same))
    cases = [Case(partitions, schedule, stages_per_device, mode, **same) for mode in MODES]
    answers = processes.run(cases[0].num_devices, run_in_processes, cases)
    for number, case in enumerate(cases):
        assert_bitwise_equal(run(case), expected, f"one process, {case}")
        for rank, outcomes in enumerate(answers):
            assert_bitwise_equal(outcomes[number], expected, f"rank {rank}, {case}")
        assert_copies_equal([outcomes[number] for outcomes in answers])


def test_replicas_train_what_one_shared_parameter_would(processes: ProcessPool) -> None:
    for partitions, schedule, stages_per_device in (((3, 3), "gpipe", 1), ((2, 1, 1, 2), "interleaved_1f1b", 2)):
        case = Case(partitions, schedule, stages_per_device)
        answers = processes.run(4, run_in_processes, [case], 2)
        expected = run_plain(case)
        for (outcome,) in answers:
            assert_close(outcome, expected)
        assert_copies_equal([outcome for (outcome,) in answers[:2]])
        for (one,), (other,) in zip(answers[:2], answers[2:], strict=True):
            assert_bitwise_equal(one, other)


def test_the_norm_counts_a_tied_parameter_once() -> None:
    for partitions in ((6,), (3, 3)):
        case = Case(partitions, max_norm=0.05, zeroed=(0, 1, 2))
        found, expected = run(case), run_plain(case)
        assert min(found.norms) > 0.05, "nothing was clipped"
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-12, atol=0)
        for name, gradient in found.gradients[0].items():
            torch.testing.assert_close(gradient, expected.gradients[0][name], rtol=1e-5, atol=0, msg=name)


# Copies that get no gradient.


class Skip(nn.Module):
    """Multiplies by its weight where it is told to."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.is_used = is_used

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.is_used else x


def skipping(*is_used: bool) -> nn.Sequential:
    last = nn.Linear(3, 3).double()
    nn.init.eye_(last.weight)
    nn.init.zeros_(last.bias)
    layers = nn.Sequential(*(Skip(is_used=is_it) for is_it in is_used), last)
    for layer in layers[1:-1]:
        layer.weight = layers[0].weight
    return layers


def gradients_of_skipping(
    rank: int, uses: list[tuple[bool, ...]], frozen: bool = False
) -> list[dict[str, Tensor | None]]:
    found = []
    for is_used in uses:
        layers = skipping(*is_used)
        layers[0].weight.requires_grad_(not frozen)
        mesh = mesh_of() if rank >= 0 else None
        partitions = [1] * len(layers) if rank >= 0 else [len(layers)]
        pipeline = gpipe.Pipeline(layers, nn.MSELoss(), partitions, 2, mesh=mesh, timeout_seconds=10)
        for _ in range(2):
            pipeline.train_step((ONES, ONES))
        found.append({name: p.grad for name, p in pipeline.named_parameters() if "3" not in name})
        pipeline.close()
    return found


ONES = torch.ones(4, 3, dtype=torch.float64)
USES = [(False, False, False), (True, False, True), (False, True, False), (False, False, True), (True, True, False)]


def test_a_copy_without_a_gradient_counts_as_zero(processes: ProcessPool) -> None:
    expected = gradients_of_skipping(-1, USES)
    answers = processes.run(4, gradients_of_skipping, USES)
    for number, is_used in enumerate(USES):
        gradients = {name: g for answer in answers for name, g in answer[number].items()}
        assert gradients.keys() == expected[number].keys()
        for name, gradient in gradients.items():
            assert (gradient is None) == (not any(is_used)), f"{name}, {is_used}"
            assert gradient is expected[number][name] or torch.equal(gradient, expected[number][name])
        plain = skipping(*is_used)
        for _ in range(2):
            nn.MSELoss()(plain(ONES), ONES).backward()
        for gradient in gradients.values():
            torch.testing.assert_close(gradient, plain[0].weight.grad, rtol=1e-12, atol=0)


def test_a_frozen_parameter_stays_without_gradient(processes: ProcessPool) -> None:
    uses = [(True, True, True)]
    answers = [gradients_of_skipping(-1, uses, True), *processes.run(4, gradients_of_skipping, uses, True)]
    assert all(gradient is None for (gradients,) in answers for gradient in gradients.values())


PARTLY_FROZEN = (
    "layers.2.table is frozen, but layers.0.weight, which is the same parameter, is not; freeze all layers' copies "
    "of it (requires_grad_(False)), or none"
)


def freeze_in_part(rank: int) -> str:
    mesh = mesh_of() if rank >= 0 else None
    pipeline = gpipe.Pipeline(tied_layers(), loss, [2, 4], 3, mesh=mesh, timeout_seconds=10)
    for name, parameter in pipeline.named_parameters():
        parameter.requires_grad_(name not in TABLE[1:])
    with pytest.raises((ValueError, gpipe.PipelineError)) as error:
        pipeline.train_step(mini_batch(0))
    return str(error.value)


def test_a_parameter_that_is_frozen_in_part_is_refused(processes: ProcessPool) -> None:
    assert freeze_in_part(-1) == PARTLY_FROZEN
    for message in processes.run(2, freeze_in_part):
        assert PARTLY_FROZEN in message


# What it costs.


class Storages(TorchDispatchMode):
    """Counts the tensors of some size that were made under it and live at once."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes, self.living, self.most = num_bytes, 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)]
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() == self.num_bytes:
            storage = result.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.living += 1
                self.most = max(self.most, self.living)
                weakref.finalize(result, self._gone, storage._cdata)
        return result

    def _gone(self, key: int) -> None:
        self.known.discard(key)
        self.living -= 1


def count_memory(rank: int, partitions: tuple[int, ...]) -> list[int]:
    mesh = mesh_of() if rank >= 0 else None
    pipeline = gpipe.Pipeline(tied_layers(), loss, partitions, 3, mesh=mesh, timeout_seconds=10)
    finish, most = pipeline._tied.finish_step, []

    def watched() -> None:
        with Storages(9 * 6 * 8) as storages:
            finish()
        most.append(storages.most)

    with mock.patch.object(pipeline._tied, "finish_step", watched):
        for step in range(2):  # in the second there are gradients of the first
            pipeline.train_step(mini_batch(step))
    pipeline.close()
    return most


def test_the_exchange_needs_memory_for_one_more_gradient_at_most(processes: ProcessPool) -> None:
    assert count_memory(-1, (6,)) == [0, 0]
    assert processes.run(2, count_memory, (3, 3)) == [[0, 0], [1, 1]]
    assert processes.run(3, count_memory, (2, 1, 3)) == [[0, 0], [1, 1], [1, 1]]


def count_groups(rank: int) -> list[int]:
    mesh, counts = mesh_of(), []
    untied = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for layers, partitions in ((untied, (1, 3)), (tied_layers(), (3, 3))):
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
            gpipe.Pipeline(layers, loss, partitions, mesh=mesh, timeout_seconds=10).close()
        counts.append(made.call_count)
    return counts


def test_a_model_without_tied_parameters_makes_no_connections_for_them(processes: ProcessPool) -> None:
    assert processes.run(2, count_groups) == [[1, 2]] * 2  # both tied groups are in the same two processes


# Failures.


def fail_in_exchange(rank: int, fate: str) -> tuple[str, float]:
    seconds = 5 if fate == "stop" else 30  # a loaded machine is slow to begin
    pipeline = gpipe.Pipeline(tied_layers(), loss, [2, 2, 2], 3, mesh=mesh_of(), timeout_seconds=seconds)
    pipeline.train_step(mini_batch(0))

    def meet_fate(*_: Any) -> None:
        if fate != "error":
            os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)
        raise OSError("the disk is full")

    with mock.patch.object(Peers, "broadcast", meet_fate) if rank == 1 else mock.MagicMock():
        begin = time.monotonic()
        try:
            pipeline.train_step(mini_batch(1))
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            assert pipeline.step == 1
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", 0.0


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fate", "cause"),
    [
        ("kill", r"stage 1 \(rank 1, .*is gone without a word"),
        ("stop", r"stage 1 \(rank 1, .* does not answer"),
        ("error", "rank 1, stage 1, adding up the gradients of tied parameters: OSError: the disk is full"),
    ],
)
def test_a_process_that_fails_in_the_exchange_ends_all(fate: str, cause: str) -> None:
    answers = fresh_processes.run(3, fail_in_exchange, fate, mute=1 if fate == "stop" else None)
    for rank in (0, 2):
        message, seconds = answers[rank]
        assert re.match(f"PeerFailure: {cause}", message), message
        assert seconds < 5 + 2 * 5
    assert (1 in answers) == (fate == "error")


def disagree(rank: int, what: str) -> str:
    layers = tied_layers()
    if what == "values":
        nn.init.constant_(layers[0].weight, rank)
    elif rank == 1:
        layers[5] = nn.Linear(6, 9).double()
    with pytest.raises(ValueError, match="give every process the same") as error:
        gpipe.Pipeline(layers, loss, [3, 3], 3, mesh=mesh_of(), timeout_seconds=10)
    return str(error.value)


def test_processes_that_disagree_about_tied_parameters_are_refused(processes: ProcessPool) -> None:
    for message in processes.run(2, disagree, "values"):
        assert message.startswith("the checksum of layers.0.weight, a tied parameter, is ")
    for message in processes.run(2, disagree, "ties"):
        assert message.startswith(f"tied parameters is {[list(TABLE), list(MATRIX)]} in stage 0 and ")


def adam_of_the_model(_: gpipe.Pipeline, of_model: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(of_model, lr=0.1)


def adam_with_groups(pipeline: gpipe.Pipeline, _: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter], "weight_decay": 0.5 if name == "layers.0.weight" else 0.0}
        for name, parameter in pipeline.named_parameters()
    ]
    return torch.optim.AdamW(groups, lr=0.1)


def part_copies(rank: int, makers: list[Any]) -> list[str]:
    """Return what is said once the optimizer has parted copies."""
    found = []
    for make in makers:
        layers = tied_layers()
        parameters = [*layers.parameters()]  # as they were before there were copies
        pipeline = gpipe.Pipeline(layers, loss, [3, 3], 2, mesh=mesh_of(), timeout_seconds=10)
        optimizer = make(pipeline, parameters)
        pipeline.train_step(mini_batch(0))
        optimizer.step()
        with pytest.raises(ValueError, match="tied parameter") as error:
            pipeline.train_step(mini_batch(1))
        found.append(str(error.value))
    return found


def test_copies_that_an_optimizer_has_parted_are_refused_in_every_process(processes: ProcessPool) -> None:
    for said in itertools.chain(*processes.run(2, part_copies, [adam_of_the_model, adam_with_groups])):
        assert re.match(
            r"^layers\.\d\.\S+ and layers\.\d\.\S+ are copies of one tied parameter and were not equal when the step "
            r"began; give an optimizer all of pipeline\.parameters\(\), .*$",
            said,
        )
