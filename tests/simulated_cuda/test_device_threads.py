"""A launching thread per device trains what one thread trains, bit by bit, and each launches for its own device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulated_cuda import threaded
from tests.simulated_cuda.machine import Machine
from tests.simulated_cuda.steps import THREADS, Setting, assert_same_bits, train_each
from tests.simulated_cuda.streams import NUM_DEVICES
from tests.simulated_cuda.test_steps import (
    LAYOUTS,
    MACHINES,
    MODES,
    Layout,
    assert_that_the_host_hardly_waits,
    settings_of,
    train_one_stage,
)

on_several = pytest.mark.parametrize(
    "machine", [name for name, number in MACHINES.items() if number > 1], indirect=True
)
SEVERAL = [layout for layout in LAYOUTS if layout[1] > layout[2]]


@pytest.mark.slow
@on_several
@pytest.mark.parametrize("layout", SEVERAL, ids=str)
def test_threads_train_as_one_stage_does(layout: Layout, machine: Machine) -> None:
    settings = [replace(setting, device_threads=True) for setting in settings_of(layout, SEVERAL)]
    (outcomes,) = machine.run(1, train_each, settings)
    for setting, outcome in zip(settings, outcomes, strict=True):
        assert_same_bits(outcome, train_one_stage(machine, setting), str(setting))
        num_devices = min(layout[1] // layout[2], MACHINES["simulated" if machine.simulated else "real"])
        assert outcome[THREADS] == 1 + num_devices  # the first step and evaluations have the caller's
        if machine.simulated:
            assert_that_the_host_hardly_waits(outcome, setting)


@on_several
def test_autocast_reaches_every_thread(machine: Machine) -> None:
    settings = [Setting(3, mode, autocast=True, device_threads=True) for mode in MODES]
    (outcomes,) = machine.run(1, train_each, settings)
    for setting, outcome in zip(settings, outcomes, strict=True):
        assert_same_bits(outcome, train_one_stage(machine, setting), str(setting))


def test_a_batch_may_be_made_on_any_device_by_any_stream(simulated: Machine) -> None:
    losses = [simulated.run(1, threaded.train_beside, f"cuda:{index}")[0] for index in range(NUM_DEVICES)]
    assert losses == [losses[0]] * NUM_DEVICES


@on_several
def test_tasks_of_two_devices_run_at_the_same_time(machine: Machine) -> None:
    assert machine.run(1, threaded.meet) == [(True, 0)]


@on_several
def test_a_signals_error_ends_the_step_and_the_next_one_goes_well(machine: Machine) -> None:
    assert machine.run(1, threaded.interrupt) == [True]


@on_several
def test_the_threads_end_with_the_pipeline(machine: Machine) -> None:
    assert machine.run(1, threaded.release) == [0]


@on_several
@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_in_a_thread_ends_the_step_and_the_next_one_goes_well(stage: int, machine: Machine) -> None:
    ((said, goes_on),) = machine.run(1, threaded.fail, stage)
    layer = 1 + 2 * stage
    assert said == f"stage {stage}, micro-batch 0, layer {layer} (_Calling), forward: ZeroDivisionError: by nobody"
    assert goes_on


@on_several
@pytest.mark.parametrize("name", threaded.DRAWS)
def test_layers_that_draw_on_the_host_are_refused(name: str, machine: Machine) -> None:
    (said,) = machine.run(1, threaded.draw, name)
    assert said.startswith("stage 1, micro-batch 0, forward: a layer or the loss draws from ")
    assert f"from {name}'s generator" in said
    assert said.endswith("do not use a thread per device (launch.device_threads=false)")
