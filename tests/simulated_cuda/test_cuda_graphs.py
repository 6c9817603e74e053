"""Layers as CUDA graphs train what they train as they are, bit by bit, with a launch for each."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.simulated_cuda import graphed
from tests.simulated_cuda.machine import Machine
from tests.simulated_cuda.steps import CUTS, GRAPHS, Setting, assert_same_bits, train_each
from tests.simulated_cuda.test_steps import (
    MACHINES,
    assert_that_the_host_hardly_waits,
    on_all_machines,
    train_one_stage,
)

NUM_LAYERS = sum(CUTS[1])
# Of a layer, in the second step, with four micro-batches: two that keep their graph, three that are recomputed.
LAUNCHES = {"always": 4 * 3, "except_last": 3 * 3 + 2, "never": 4 * 2}
SETTINGS = [
    Setting(2, "never", "1f1b", tied=True, cuda_graphs=True),
    Setting(3, "except_last", cuda_graphs=True),
    Setting(3, "always", "zb_h1", cuda_graphs=True),
    Setting(2, "always", autocast=True, cuda_graphs=True),
]
TWO_DEVICES = [name for name, num_devices in MACHINES.items() if num_devices > 1]


@pytest.mark.slow
@on_all_machines
def test_one_process_trains_as_one_stage_without_graphs_does(machine: Machine) -> None:
    (outcomes,) = machine.run(1, train_each, SETTINGS)
    for setting, outcome in zip(SETTINGS, outcomes, strict=True):
        assert_same_bits(outcome, train_one_stage(machine, setting), str(setting))
        if machine.simulated:
            assert_that_the_host_hardly_waits(outcome, setting)
            assert outcome[GRAPHS] == NUM_LAYERS * LAUNCHES[setting.rematerialize], setting


@pytest.mark.parametrize("machine", TWO_DEVICES, indirect=True)
def test_one_process_per_device_trains_as_one_stage_without_graphs_does(machine: Machine) -> None:
    settings = [Setting(2, "always", cuda_graphs=True), Setting(2, "never", "1f1b", cuda_graphs=True)]
    for rank, outcomes in enumerate(machine.run(2, train_each, settings)):
        for setting, outcome in zip(settings, outcomes, strict=True):
            assert_same_bits(outcome, train_one_stage(machine, setting), f"{setting}, rank {rank}")


# How many graphs three steps of two micro-batches launch. Each layer has a forward that is recomputed, a recomputation
# and its backward, twice; the first one of each runs plainly.
LAUNCHES_OF_KINDS = {
    "counting": [6, 12, 12],  # those of the linear layers: it changes a buffer
    "changing": [9, 18, 15],  # it is captured anew in the last step
    "renewed": [9, 18, 15],  # and so is this one
    "in place": [9, 18, 18],
    "passing by": [18, 36, 36],
    "empty": [12, 24, 24],
    "views": [6, 12, 12],  # those of the linear layers around the two
}


@functools.cache
def train_all(machine: Machine, *, cuda_graphs: bool) -> dict[tuple[str, str], dict[str, Any]]:
    (found,) = machine.run(1, partial(graphed.train_all, cuda_graphs=cuda_graphs), list(LAUNCHES_OF_KINDS))
    return found


@on_all_machines
@pytest.mark.parametrize("name", LAUNCHES_OF_KINDS)
def test_layers_of_all_kinds_train_as_they_are(name: str, machine: Machine) -> None:
    for mode in ("always", "never"):
        found, expected = (dict(train_all(machine, cuda_graphs=graphs)[name, mode]) for graphs in (True, False))
        launched = [found.pop(f"graphs {step}") for step in range(3)]
        assert [expected.pop(f"graphs {step}") for step in range(3)] == [0, 0, 0]
        if machine.simulated and mode == "always":
            assert launched == LAUNCHES_OF_KINDS[name]
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert np.array_equal(value, expected[key]), f"{mode}: {key}"


def test_a_layer_that_changes_in_each_step_is_captured_no_more_after_a_while(simulated: Machine) -> None:
    train = partial(graphed.train_layers, cuda_graphs=True, num_steps=12)
    (found,) = simulated.run(1, train, "changing", "always")
    # It has changed eight times in the tenth step.
    assert [found[f"graphs {step}"] for step in range(12)] == [9, 18, *[15] * 8, 12, 12]


@on_all_machines
def test_a_layer_that_waits_for_the_gpu_is_refused(machine: Machine) -> None:
    (answer,) = machine.attempt(1, partial(graphed.train_layers, cuda_graphs=True), "waiting", "always")
    assert "micro-batch 1, layer 1 (_Waiting), forward: ValueError: the layer cannot be captured" in answer.error
    assert "set trainer.cuda_graphs=false" in answer.error


def test_a_layer_whose_weight_would_not_be_trained_is_refused(simulated: Machine) -> None:
    (answer,) = simulated.attempt(1, partial(graphed.train_layers, cuda_graphs=True), "hiding", "never")
    assert "layer 1 (_Hiding), forward: ValueError: the layer reads its parameter weight elsewhere" in answer.error


def test_layers_that_exchange_among_replicas_are_refused(simulated: Machine) -> None:
    for said in simulated.run(2, graphed.exchange_among_replicas):
        assert [text.split(" is True, ")[0] for text in said] == ["synchronize_batch_norm", "shard_replicas"]


def test_a_replay_does_again_what_was_captured(simulated: Machine) -> None:
    assert simulated.run(1, graphed.replay) == [[1.0, 2.0, 4.0, 3.0, 6.0]]


def test_what_no_capture_may_do_is_refused(simulated: Machine) -> None:
    (said,) = simulated.run(1, graphed.break_rules)
    assert said == [
        "CUDA graphs must be captured on a non-default stream.",
        "CUDA error: operation not permitted when stream is capturing: of another thread",
        "CUDA error: operation not permitted when stream is capturing",
    ]
