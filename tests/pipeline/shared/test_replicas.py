"""Replicas of a pipeline train what one model trains on all their mini-batches together."""

from __future__ import annotations

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.pipeline.shared.replica_case import (
    MODES,
    Case,
    Layout,
    assert_equal_to_plain,
    dropped,
    gates_alone,
    loss,
    normalized_in_the_middle,
    output_that_nobody_uses,
    plain_layers,
    whole_batch,
    with_modes,
)
from tests.support.process_pool import ProcessPool


def train_dropped(rank: int, num_replicas: int) -> list[np.ndarray | None]:
    """Train layers with dropout for two steps, with a micro-batch of 3 for each of 4 parts; return the gradients."""
    mesh = init_device_mesh("cpu", (num_replicas, 1), mesh_dim_names=("replica", "stage")) if num_replicas > 1 else None
    pipeline = gpipe.Pipeline(dropped(), loss, (5,), 4 // num_replicas, mesh=mesh, timeout_seconds=10)
    for step in range(2):
        part = (part.chunk(num_replicas)[pipeline.job.replica_index] for part in whole_batch(Case((12,)), step))
        pipeline.train_step(tuple(part))
    pipeline.close()
    return [parameter.grad.numpy() for parameter in pipeline.parameters()]


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_replicas_have_the_masks_of_one_pipeline_with_all_their_micro_batches(
    num_replicas: int, processes: ProcessPool
) -> None:
    expected = train_dropped(0, 1)
    for found in processes.run(num_replicas, train_dropped, num_replicas):
        for gradient, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-12, atol=1e-14)


def assigned(rank: int) -> list[np.ndarray]:
    """Train two replicas on other mini-batches, then again with other parameter objects; return the gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(plain_layers(), loss, (5,), 2, mesh=mesh, timeout_seconds=10)
    batch = tuple(part.split((3, 5))[rank] for part in whole_batch(Case((3, 5)), 0))
    found = []
    for _ in range(2):
        pipeline.train_step(batch)
        found.append(np.concatenate([p.grad.numpy().ravel() for p in pipeline.parameters() if p.grad is not None]))
        pipeline.layers.load_state_dict({k: v.clone() for k, v in pipeline.layers.state_dict().items()}, assign=True)
    pipeline.close()
    return found


def test_gradients_are_averaged_also_of_parameters_that_came_later(processes: ProcessPool) -> None:
    (first, second), (first_of_other, second_of_other) = processes.run(2, assigned)
    assert np.array_equal(first, second) and np.array_equal(first, first_of_other)
    assert np.array_equal(second, second_of_other)


def test_gradients_are_those_of_all_mini_batches_together(layout: Layout, processes: ProcessPool) -> None:
    sizes = ((8, 8), (7, 2), (1, 4))  # even; uneven in sum and in parts; fewer than micro-batches
    values = [(each, weighted) for weighted in (False, True) for each in sizes]
    cases = [Case(each, mode, weighted=weighted) for (each, weighted), mode in with_modes(layout, values)]
    assert_equal_to_plain(processes, layout, cases)


def test_gradients_are_those_of_all_mini_batches_under_1f1b(processes: ProcessPool) -> None:
    cases = [Case(sizes, mode) for sizes in ((7, 2), (1, 4)) for mode in MODES]
    assert_equal_to_plain(processes, Layout(2, (2, 3), "1f1b"), cases)


def test_a_parameter_may_be_unused_in_a_replica_or_a_micro_batch(layout: Layout, processes: ProcessPool) -> None:
    # Of 8 examples a replica, in micro-batches of 2: used in one replica's last, first, and middle micro-batch; in the
    # last of one and the first of the other; nowhere.
    used = ((7,), (0,), (10,), (6, 8), (0, 15), ())
    cases = [Case((8, 8), mode, gated=gated, num_steps=2) for gated, mode in with_modes(layout, used)]
    assert_equal_to_plain(processes, layout, cases)


def test_a_stage_may_have_no_parameter_that_is_used(layout: Layout, processes: ProcessPool) -> None:
    used = ((7,), (0,), (8,), ())
    pairs = with_modes(layout, used)
    cases = [Case((8, 8), mode, gated=gated, num_steps=2, layers=gates_alone) for gated, mode in pairs]
    assert_equal_to_plain(processes, layout, cases)


def test_a_boundary_output_may_have_no_use(layout: Layout, processes: ProcessPool) -> None:
    cases = [Case((4, 3), mode, gated=(0, 5), num_steps=2, layers=output_that_nobody_uses) for mode in MODES]
    assert_equal_to_plain(processes, layout, cases)


def test_two_steps_without_zeroing_add_up(layout: Layout, processes: ProcessPool) -> None:
    cases = [Case((4, 3), mode, gated=(0,), num_steps=3, zero_grad=False) for mode in MODES]
    assert_equal_to_plain(processes, layout, cases)


@pytest.mark.parametrize(
    ("split", "whole"),
    [
        (Layout(2, (2, 3), "split_gpipe"), Layout(1, (5,), "gpipe")),
        (Layout(2, (2, 3), "zb_h1"), Layout(1, (5,), "1f1b")),
        (Layout(2, (1, 1, 1, 2), "zb_v"), Layout(1, (5,), "1f1b")),
    ],
    ids=lambda layout: layout.schedule,
)
def test_split_backwards_have_the_bits_of_whole_ones(split: Layout, whole: Layout, processes: ProcessPool) -> None:
    cases = [
        Case((7, 4), mode, 2, num_steps=2, zero_grad=(place % 2 == 0) == (layers is dropped), layers=layers)
        for place, mode in enumerate(MODES)
        for layers in (dropped, normalized_in_the_middle)
    ]
    answers, expected = split.run(processes, cases), whole.run(processes, cases)
    for rank, outcomes in enumerate(answers):
        for found, other in zip(outcomes, expected[rank // 2], strict=True):
            assert found.losses == other.losses
            for step, gradients in enumerate(found.gradients):
                for name, gradient in gradients.items():
                    assert np.array_equal(gradient, other.gradients[step][name]), (rank, step, name)
            for name, value in found.state.items():
                assert np.array_equal(value, other.state[name]), (rank, name)


def test_a_layer_may_be_unfrozen_between_steps(layout: Layout, processes: ProcessPool) -> None:
    some = [Case((4, 3), mode, num_steps=3, frozen_at_first=(1, 4)) for mode in MODES]
    whole_stage = Case((4, 3), num_steps=3, frozen_at_first=(0, 1, 2))
    assert_equal_to_plain(processes, layout, [*some, whole_stage])


def test_weights_stay_bitwise_equal_across_replicas(layout: Layout, processes: ProcessPool) -> None:
    cases = [Case((5, 2), mode, gated=(1, 6), num_steps=4) for mode in MODES]
    answers = layout.run(processes, cases)
    for rank in range(layout.num_devices):
        for first, second in zip(answers[rank], answers[layout.num_devices + rank], strict=True):
            assert first.state.keys() == second.state.keys()
            for name, value in first.state.items():
                assert np.array_equal(value, second.state[name]), name
