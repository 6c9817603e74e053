"""On GPUs too, a pipeline trains what one stage trains, bit by bit: nothing races, and the host hardly waits."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gpipe.planning.optimizer_memory import try_optimizer
from gpipe.training.optimizers import OPTIMIZERS, build_optimizer
from tests.simulated_cuda.beside_steps import METRIC_WAITS, compute
from tests.simulated_cuda.machine import Machine
from tests.simulated_cuda.saves import save
from tests.simulated_cuda.steps import (
    BLIND_EXCHANGES,
    PLACES,
    SYNCHRONISATIONS,
    Setting,
    assert_same_bits,
    count_transfers,
    evaluate_and_overwrite,
    train,
    train_each,
    train_with_class_weights,
    train_with_metric,
)
from tests.simulated_cuda.streams import NUM_DEVICES
from tests.simulated_cuda.updates import measure_update, update

Layout = tuple[str, int, int]
MODES = ("always", "except_last", "never")
LAYOUTS = [
    *((name, num_stages, 1) for name in ("gpipe", "1f1b") for num_stages in (1, 2, 3)),
    *((name, 3, 1) for name in ("split_gpipe", "zb_h1")),
    *((name, num_stages, 2) for name in ("interleaved_1f1b", "zb_v") for num_stages in (4, 6)),
]
MACHINES = {"simulated": NUM_DEVICES} | ({"real": torch.cuda.device_count()} if torch.cuda.is_available() else {})
IN_PROCESSES = [
    (name, layout)
    for name, num_devices in MACHINES.items()
    for layout in LAYOUTS
    if 1 < layout[1] // layout[2] <= num_devices
]
on_all_machines = pytest.mark.parametrize("machine", MACHINES, indirect=True)


@functools.cache
def train_one_stage(machine: Machine, setting: Setting) -> dict[str, Any]:
    (found,) = machine.run(1, train, setting.one_stage())
    return found


def settings_of(layout: Layout, layouts: list[Layout]) -> list[Setting]:
    """Return a setting for each mode that is the layout's turn: the layouts of a schedule share the modes out.

    In all modes but the first, two layers share a weight.
    """
    name, num_stages, stages_per_device = layout
    alike = [other for other in layouts if other[0] == name]
    modes = MODES[alike.index(layout) :: len(alike)]
    return [Setting(num_stages, mode, name, stages_per_device, tied=mode != "always") for mode in modes]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_simulated_gpu_computes_what_the_cpu_does(schedule: str, simulated: Machine) -> None:
    on_cpu, on_gpu = (Setting(schedule=schedule, device=device) for device in ("cpu", "cuda"))
    assert_same_bits(train_one_stage(simulated, on_gpu), train_one_stage(simulated, on_cpu), "cuda:0")


NUM_EXCHANGES = 2 * 2 * 4  # of two batch norms in the forward and the backward of four micro-batches


def assert_that_the_host_hardly_waits(outcome: dict[str, Any], setting: Setting, num_replicas: int = 1) -> None:
    most = 2
    if num_replicas > 1 and not setting.shards_replicas:
        # A gradient that a replica lacks is dropped where all lack it: the host asks for all of them at once. (Weights
        # that are shared out have gradients of zeros instead.)
        most += 1
    if setting.synchronize_batch_norm:
        # The host reads in each exchange which batch norm the others run, before it uses the numbers of another one.
        most += NUM_EXCHANGES
    assert outcome[SYNCHRONISATIONS] <= most, f"{setting}: {outcome[PLACES]}"
    assert outcome[BLIND_EXCHANGES] == 0, setting


@on_all_machines
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_process_of_several_devices_trains_as_one_stage_does(layout: Layout, machine: Machine) -> None:
    settings = settings_of(layout, LAYOUTS)
    (outcomes,) = machine.run(1, train_each, settings)
    for setting, outcome in zip(settings, outcomes, strict=True):
        assert_same_bits(outcome, train_one_stage(machine, setting), str(setting))
        if machine.simulated:
            assert_that_the_host_hardly_waits(outcome, setting)


@pytest.mark.parametrize(("machine", "layout"), IN_PROCESSES, indirect=["machine"], ids=str)
def test_one_process_per_device_trains_as_one_stage_does(layout: Layout, machine: Machine) -> None:
    layouts = [layout for layout in LAYOUTS if layout[1] > layout[2]]
    settings = settings_of(layout, layouts)
    for rank, outcomes in enumerate(machine.run(layout[1] // layout[2], train_each, settings)):
        for setting, outcome in zip(settings, outcomes, strict=True):
            assert_same_bits(outcome, train_one_stage(machine, setting), f"{setting}, rank {rank}")
            if machine.simulated:
                assert_that_the_host_hardly_waits(outcome, setting)


@pytest.mark.parametrize(
    ("num_processes", "setting"),
    [  # that no layout above has
        (3, Setting(3, "always")),
        *((num_processes, Setting(3, "always", "zb_h1", tied=True)) for num_processes in (1, 3)),
    ],
    ids=str,
)
def test_the_host_waits_twice_per_step_at_most(num_processes: int, setting: Setting, simulated: Machine) -> None:
    for outcome in simulated.run(num_processes, train, setting):
        assert_that_the_host_hardly_waits(outcome, setting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_replicas", "settings"),
    [
        (2, [Setting(2, "always", synchronize_batch_norm=True), Setting(2, "always", "1f1b", cuda_graphs=True)]),
        (2, [Setting(2, "always", shards_optimizer=True), Setting(2, "always", shards_replicas=True)]),
        (2, [Setting(2, "never", "1f1b", shards_replicas=True, synchronize_batch_norm=True)]),
        (2, [Setting(2, "except_last", "zb_h1"), Setting(2, "never", "split_gpipe", synchronize_batch_norm=True)]),
        (3, [Setting(1, "never", "1f1b"), Setting(1, "always", shards_optimizer=True)]),
        (3, [Setting(1, "always", shards_replicas=True), Setting(1, "always", synchronize_batch_norm=True)]),
    ],
    ids=str,
)
def test_replicas_train_as_on_the_cpu(num_replicas: int, settings: list[Setting], simulated: Machine) -> None:
    num_processes = num_replicas * settings[0].num_stages
    on_gpu, on_cpu = (
        simulated.run(num_processes, train_each, [replace(setting, device=device) for setting in settings])
        for device in ("cuda", "cpu")
    )
    for (rank, setting), (found, expected) in zip(
        itertools.product(range(num_processes), settings),
        zip(itertools.chain(*on_gpu), itertools.chain(*on_cpu), strict=True),
        strict=True,
    ):
        assert_same_bits(found, expected, f"{setting}, rank {rank}")
        assert_that_the_host_hardly_waits(found, setting, num_replicas)


@pytest.mark.parametrize(
    "kinds", [("conv",), ("conv", "nest"), ("conv", "branch"), ("conv", "nest", "branch")], ids=str
)
def test_a_payload_of_many_tensors_is_one_operation(kinds: tuple[str, ...], simulated: Machine) -> None:
    num_microbatches = 4
    assert simulated.run(2, count_transfers, kinds, num_microbatches) == [2 * num_microbatches] * 2  # there and back


def test_what_a_stage_hands_on_in_an_evaluation_may_change_right_after_it(simulated: Machine) -> None:
    assert simulated.run(2, evaluate_and_overwrite) == [[], [4.0] * 16]


@on_all_machines
def test_a_metric_may_be_on_the_cpu(machine: Machine) -> None:
    assert machine.run(1, train_with_metric) == [{"size": 2.0}]


@pytest.mark.parametrize("on_host", [True, False])
@on_all_machines
def test_class_weights_may_be_on_a_gpu_and_targets_there_or_on_the_host(machine: Machine, on_host: bool) -> None:
    ((found,), (expected,)) = (
        machine.run(1, functools.partial(train_with_class_weights, on_host=on_host), device)
        for device in ("cuda", "cpu")
    )
    assert found == pytest.approx(expected, rel=1e-6)


@on_all_machines
def test_autocast_reaches_every_device(machine: Machine) -> None:
    settings = [Setting(3, mode, autocast=True) for mode in MODES]
    (outcomes,) = machine.run(1, train_each, settings)
    for setting, outcome in zip(settings, outcomes, strict=True):
        assert_same_bits(outcome, train_one_stage(machine, setting), str(setting))


@on_all_machines
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_resumed_ones_are_those_of_the_cpu(name: str, machine: Machine) -> None:
    (found,), (expected,) = (machine.run(1, update, name, device) for device in ("cuda", "cpu"))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@on_all_machines
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_allocates_what_is_planned(name: str, machine: Machine) -> None:
    planned = try_optimizer(functools.partial(build_optimizer, name, lr=0.1, weight_decay=0.1, on_gpus=True))
    (found,) = machine.run(1, measure_update, name)
    assert found == pytest.approx(planned.update, abs=0.1)


@on_all_machines
def test_metrics_and_averages_are_those_of_the_cpu_and_the_host_waits_for_none(machine: Machine) -> None:
    (found,), (expected,) = (machine.run(1, compute, device) for device in ("cuda", "cpu"))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert np.allclose(value, expected[name], rtol=1e-5), name
    if machine.simulated:
        assert found[METRIC_WAITS] == 0


@on_all_machines
def test_a_checkpoint_has_the_weights_of_one_moment(machine: Machine) -> None:
    (found,) = machine.run(1, save)
    for number, stage in itertools.product(range(2), range(2)):
        name = f"{number} layers.{stage}.weight"
        assert np.array_equal(found[name], found[f"expected {name}"]), name
    if machine.simulated:
        assert found["bytes of pinned memory"] == 2 * 4 * 4 * 4  # no more than the tensors have
    assert found["bytes that stay pinned"] == 0
