"""A pipeline trains what the plain model trains: every gradient, moving average and updated weight, bit by bit."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe.pipeline.schedules.choice import SCHEDULES
from tests.end_to_end.transparency_case import (
    STAGES_PER_DEVICE,
    Case,
    Outcome,
    assert_bitwise_equal,
    batch,
    cuts,
    run,
    run_in_processes,
)
from tests.support.process_pool import ProcessPool
from tests.support.random_layers import DEPENDS_ON_MICROBATCH, KINDS, build

MODES = ("always", "except_last", "never")
EVERYTHING = (
    "conv", "norm", "branch", "dropout", "conv", "channels_last", "nest", "frozen", "drop_path", "norm", "join",
    "sometimes", "unused", "linear",
)  # fmt: skip
CUTS = {1: (15,), 2: (7, 8), 3: (3, 4, 8), 4: (1, 6, 5, 3), 6: (2, 2, 3, 2, 1, 5), 8: (1, 2, 2, 2, 2, 2, 2, 2)}
PLAIN = [(name, num_devices, 1) for name in ("gpipe", "1f1b", "split_gpipe", "zb_h1") for num_devices in (1, 2, 3, 4)]
INTERLEAVED = [("interleaved_1f1b", num_devices, each) for num_devices, each in ((1, 2), (2, 2), (2, 4), (3, 2))]
V = [("zb_v", num_devices, 2) for num_devices in (1, 2, 3, 4)]
LAYOUTS = PLAIN + INTERLEAVED + V


def everything(
    name: str, num_devices: int, stages_per_device: int, num_microbatches: int, batch_size: int, mode: str
) -> Case:
    """Return a case of all kinds of layers; in the mode "some", stages keep different numbers of micro-batches."""
    cut = CUTS[num_devices * stages_per_device]
    if mode == "some":
        some = tuple((1, 0, 2)[stage % 3] for stage in range(len(cut)))
        return Case(
            EVERYTHING, cut, num_microbatches, batch_size, some, schedule=name, stages_per_device=stages_per_device
        )
    return Case(EVERYTHING, cut, num_microbatches, batch_size, mode, schedule=name, stages_per_device=stages_per_device)


def oracle(case: Case) -> Outcome:
    """Run a case without a pipeline; cases that differ in how they are cut share one run."""
    return run_once(case.one_stage())


run_once = functools.cache(run)


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = tuple(KINDS),
    dtype: torch.dtype = torch.float32,
    num_devices: int | None = None,
) -> Case:
    """Draw a schedule, a sequence of layers, a way to cut it, M, N and a mode."""
    schedule = draw(st.sampled_from(list(SCHEDULES)))
    num_devices = num_devices or draw(st.integers(1, 4))
    stages_per_device = STAGES_PER_DEVICE[schedule]
    num_stages = num_devices * stages_per_device
    sequence = tuple(draw(st.lists(st.sampled_from(kinds), min_size=max(3, num_stages - 1), max_size=9)))
    return Case(
        sequence,
        draw(st.sampled_from(cuts(len(sequence) + 1, num_stages))),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2, 3, 5, 8))),
        draw(st.sampled_from(MODES) | st.tuples(*[st.integers(0, 3)] * num_stages)),
        dtype,
        schedule,
        stages_per_device,
    )


def sizes_and_modes(number: int) -> list[tuple[int, int, str]]:
    """Return nine of the 27 M, N and modes: each pair of two of them. Three numbers in a row have all 27."""
    return [
        (num_microbatches, batch_size, MODES[(number + row + column) % 3])
        for row, num_microbatches in enumerate((1, 2, 4))
        for column, batch_size in enumerate((8, 7, 3))
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_process_trains_as_one_stage_does(layout: tuple[str, int, int]) -> None:
    for sizes_and_mode in sizes_and_modes(LAYOUTS.index(layout)):
        case = everything(*layout, *sizes_and_mode)
        assert_bitwise_equal(run(case), oracle(case), str(case))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[1] > 1 or layout[0] == "gpipe"], ids=str)
def test_one_process_per_device_trains_as_one_stage_does(layout: tuple[str, int, int], processes: ProcessPool) -> None:
    all_cases = [everything(*layout, *sizes_and_mode) for sizes_and_mode in sizes_and_modes(LAYOUTS.index(layout) + 1)]
    all_cases.append(everything(*layout, 4, 7, "some"))
    for rank, outcomes in enumerate(processes.run(layout[1], run_in_processes, all_cases)):
        for case, outcome in zip(all_cases, outcomes, strict=True):
            assert_bitwise_equal(outcome, oracle(case), f"{case}, rank {rank}")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_random_layers_in_one_process_train_as_one_stage_does(case: Case) -> None:
    assert_bitwise_equal(run(case), oracle(case), str(case))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 4))
def test_random_layers_in_processes_train_as_one_stage_does(
    processes: ProcessPool, data: st.DataObject, num_devices: int
) -> None:
    several = data.draw(st.lists(cases(num_devices=num_devices), min_size=4, max_size=4))
    for rank, outcomes in enumerate(processes.run(num_devices, run_in_processes, several)):
        for case, outcome in zip(several, outcomes, strict=True):
            assert_bitwise_equal(outcome, oracle(case), f"{case}, rank {rank}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(tuple(sorted(set(KINDS) - DEPENDS_ON_MICROBATCH)), torch.float64))
def test_micro_batches_change_no_gradient_beyond_rounding(case: Case) -> None:
    found = run(case)
    expected = oracle(replace(case, num_microbatches=1, schedule="gpipe"))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    for name, gradient in expected.gradients.items():
        if gradient is None:
            assert found.gradients[name] is None
        else:
            np.testing.assert_allclose(found.gradients[name], gradient, rtol=0, atol=1e-12, err_msg=name)
    for name, value in expected.state.items():
        np.testing.assert_allclose(found.state[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_one_stage_and_one_micro_batch_is_the_plain_model() -> None:
    kinds = tuple(kind for kind in EVERYTHING if kind not in ("dropout", "drop_path"))
    case = Case(kinds, (len(kinds) + 1,), 1, 8, "never", torch.float64)
    found = run(case)
    plain = build(kinds).double()  # outside of a pipeline a converted batch norm is the plain one
    inputs, targets = batch(case)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(found.state[f"layers.{name}"], value.numpy(), rtol=0, atol=1e-12, err_msg=name)
