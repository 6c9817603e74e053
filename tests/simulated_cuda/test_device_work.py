"""What is counted before and after a change differs in what the change is for, and in nothing that it leaves alone."""

from __future__ import annotations

from experiments.device_work.counts import count_averaging, count_images, count_loss, count_step
from tests.simulated_cuda.machine import Machine


def test_a_gradient_does_not_wait_for_averages_unless_backwards_await_them(simulated: Machine) -> None:
    awaited, now = (simulated.run(4, count_averaging, is_awaited) for is_awaited in (True, False))
    for before, after in zip(awaited, now, strict=True):
        differing = {name for name in before if before[name] != after[name]}
        # The peak depends on when messages arrive.
        assert differing <= {"averages_before_gradients", "peak_bytes"} and after["averages_before_gradients"] == 0
    assert sum(before["averages_before_gradients"] for before in awaited) > 0


def test_a_copy_of_each_weight_per_step_takes_fewer_kernels_and_waits_no_more(simulated: Machine) -> None:
    for mode in ("always", "never"):
        ((per_use,), (per_step,)) = (simulated.run(1, count_step, mode, keeps, 2) for keeps in (False, True))
        assert per_step["kernels"] < per_use["kernels"] and per_step["bytes_moved"] < per_use["bytes_moved"]
        assert per_step["host_synchronisations"] == per_use["host_synchronisations"]
    assert per_step["peak_bytes"] < per_use["peak_bytes"]  # kept graphs share the copies


def test_one_pass_moves_and_holds_less_than_one_operation_after_the_other(simulated: Machine) -> None:
    for what in ("training", "evaluation"):
        ((one_pass,), (one_by_one,)) = (simulated.run(1, count_loss, what, number, 512) for number in (0, 1))
        assert one_pass["bytes_moved"] < one_by_one["bytes_moved"]
        assert one_pass["peak_bytes"] < one_by_one["peak_bytes"] / 2
        assert one_pass["host_synchronisations"] == one_by_one["host_synchronisations"] == 0


def test_layers_as_graphs_take_a_tenth_of_the_launches(simulated: Machine) -> None:
    (found,) = simulated.run(1, count_images, "always", True, 2)
    assert found["kernels"] > 10 * found["launches"] and found["host_synchronisations"] == 2
