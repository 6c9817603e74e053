"""A pipeline trains what the plain model trains: every gradient, moving average and updated weight, bit by bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.process_pool import ProcessPool
from tests.random_layers import DEPENDS_ON_MICROBATCH, KINDS, build
from tests.transparency_case import Case, assert_bitwise_equal, batch, cuts, run, run_in_processes

MODES = ("always", "except_last", "never")
EVERYTHING = (
    "conv", "norm", "branch", "dropout", "conv", "channels_last", "nest", "frozen", "drop_path", "norm", "join",
    "sometimes", "unused", "linear",
)  # fmt: skip
CUTS = {1: (15,), 2: (7, 8), 3: (3, 4, 8), 4: (1, 6, 5, 3)}


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = tuple(KINDS),
    dtype: torch.dtype = torch.float32,
    num_stages: int | None = None,
) -> Case:
    """Draw a sequence of layers, a way to cut it, M, N and a mode."""
    sequence = tuple(draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=9)))
    num_stages = num_stages or draw(st.integers(1, 4))
    return Case(
        sequence,
        draw(st.sampled_from(cuts(len(sequence) + 1, num_stages))),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2, 3, 5, 8))),
        draw(st.sampled_from(MODES)),
        dtype,
    )


@pytest.mark.parametrize(("num_microbatches", "batch_size"), list(itertools.product((1, 2, 4), (8, 7, 3))))
def test_one_process_trains_as_one_stage_does(num_microbatches: int, batch_size: int) -> None:
    for num_stages, mode in itertools.product(CUTS, MODES):
        case = Case(EVERYTHING, CUTS[num_stages], num_microbatches, batch_size, mode)
        assert_bitwise_equal(run(case), run(case.one_stage()), f"K={num_stages}, {mode}")


@pytest.mark.parametrize("num_stages", CUTS)
def test_one_process_a_stage_trains_as_one_stage_does(num_stages: int, processes: ProcessPool) -> None:
    settings_ = itertools.product((1, 2, 4), (8, 7, 3), MODES)
    all_cases = [Case(EVERYTHING, CUTS[num_stages], m, n, mode) for m, n, mode in settings_]
    expected = [run(case.one_stage()) for case in all_cases]
    for rank, outcomes in enumerate(processes.run(num_stages, run_in_processes, all_cases)):
        for case, outcome, oracle in zip(all_cases, outcomes, expected, strict=True):
            assert_bitwise_equal(outcome, oracle, f"{case}, rank {rank}")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_random_layers_in_one_process_train_as_one_stage_does(case: Case) -> None:
    assert_bitwise_equal(run(case), run(case.one_stage()), str(case))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 4))
def test_random_layers_in_processes_train_as_one_stage_does(
    processes: ProcessPool, data: st.DataObject, num_stages: int
) -> None:
    several = data.draw(st.lists(cases(num_stages=num_stages), min_size=4, max_size=4))
    expected = [run(case.one_stage()) for case in several]
    for rank, outcomes in enumerate(processes.run(num_stages, run_in_processes, several)):
        for case, outcome, oracle in zip(several, outcomes, expected, strict=True):
            assert_bitwise_equal(outcome, oracle, f"{case}, rank {rank}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(tuple(sorted(set(KINDS) - DEPENDS_ON_MICROBATCH)), torch.float64))
def test_micro_batches_change_no_gradient_beyond_rounding(case: Case) -> None:
    found = run(case)
    expected = run(Case(case.kinds, case.one_stage().partitions, 1, case.batch_size, "never", torch.float64))
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
