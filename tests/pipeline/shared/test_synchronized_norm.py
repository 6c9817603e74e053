"""Batch norms of replicas normalise as those of one process with the micro-batches of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline.shared.synchronized_case import (
    MODES,
    NUM_REPLICAS,
    Case,
    Layout,
    State,
    assert_close,
    assert_equal,
    build,
    join_answers,
    mesh_of,
    plain,
    train,
    train_case,
)
from tests.support.ghost_batch_norm import Ghost
from tests.support.process_pool import ProcessPool
from tests.support.random_layers import build as random_layers

GPIPE = (Layout((8,)), Layout((2, 6)), Layout((1, 3, 4)))
ONE_FORWARD_ONE_BACKWARD = (
    Layout((8,), "1f1b"),
    Layout((1, 3, 4), "1f1b"),
    Layout((1, 2, 2, 3), "interleaved_1f1b", 2),
    Layout((2, 3, 3), "interleaved_1f1b", 3),
    Layout((1, 3, 4), "zb_h1"),
    Layout((1, 2, 2, 3), "zb_v", 2),
)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [GPIPE, ONE_FORWARD_ONE_BACKWARD], ids=["gpipe", "1f1b"])
def test_gradients_are_those_of_one_process_and_the_same_bits_for_every_cut(
    layouts: tuple[Layout, ...], processes: ProcessPool
) -> None:
    # Behind the pooling, some micro-batches of the second replica have one value per channel; in the last case all do.
    cases = [*(Case((7, 4), mode=mode) for mode in MODES), Case((1, 3), 2)]
    expected: dict[tuple[Any, ...], State] = {}
    for layout in layouts:
        answers = processes.run(NUM_REPLICAS * layout.num_devices, train, layout, cases)
        for number, case in enumerate(cases):
            for replica, found in enumerate(join_answers(answers, number, layout)):
                what = f"{case}, {layout}, replica {replica}"
                if (first := expected.setdefault(replace(case, mode=""), found)) is found:
                    assert_close(found, plain(case), what)
                assert_equal(found, first, what)


def everything() -> nn.Sequential:
    kinds = ("branch", "norm", "dropout", "nest", "drop_path", "norm", "join", "sometimes", "channels_last", "norm")
    return nn.Sequential(build()[0], nn.Upsample(6), *random_layers(kinds))


def test_layers_of_all_kinds_have_the_same_bits_for_every_cut(processes: ProcessPool) -> None:
    cases = [Case((7, 5), 4, mode, layers=everything, dtype=torch.float32) for mode in MODES]
    expected = None
    for partitions in ((13,), (4, 9), (9, 4)):
        layout = Layout(partitions)
        answers = processes.run(NUM_REPLICAS * layout.num_devices, train, layout, cases)
        for number in range(len(cases)):
            for found in join_answers(answers, number, layout):
                expected = expected or found
                assert_equal(found, expected, f"{cases[number]}, {layout}")


class Checkpointed(nn.Sequential):
    """Runs its modules inside of torch's own checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed() -> nn.Sequential:
    layers = build()
    for index in (3, 4):
        layers[index] = Checkpointed(*layers[index])
    return layers


def test_norms_in_a_checkpoint_in_a_layer_exchange_once(processes: ProcessPool) -> None:
    cases = [Case((7, 4), mode=mode, layers=checkpointed) for mode in MODES]
    layout = Layout((4, 4))
    answers = processes.run(NUM_REPLICAS * layout.num_devices, train, layout, cases)
    for number, case in enumerate(cases):
        for found in join_answers(answers, number, layout):
            assert_close(found, plain(replace(case, layers=build)), str(case))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.data())
def test_uneven_parts_count_by_their_values(processes: ProcessPool, data: st.DataObject) -> None:
    num_replicas = data.draw(st.sampled_from((2, 3)))
    sizes = st.tuples(*[st.integers(1, 7)] * num_replicas)
    drawn = st.builds(Case, sizes, st.integers(1, 4), st.sampled_from(MODES))
    cases = data.draw(st.lists(drawn, min_size=5, max_size=5))
    for outcomes in processes.run(num_replicas, train_uneven, num_replicas, cases):
        for found, case in zip(outcomes, cases, strict=True):
            assert_close(found, plain(case), str(case))


def train_uneven(rank: int, num_replicas: int, cases: list[Case]) -> list[State]:
    layout = Layout((8,))
    mesh = mesh_of(layout, num_replicas)
    return [train_case(case, layout, mesh) for case in cases]


def test_a_micro_batch_without_targets_takes_part_in_the_gradients_of_the_others(processes: ProcessPool) -> None:
    # The first and last micro-batch of replica 0; the last, whose backward is first, of replica 1; the second of both.
    paddings = ((0, 1, 4, 5), (10, 11), (2, 3, 8, 9))
    cases = [Case(mode=mode, padding=padding) for padding in paddings for mode in ("except_last", "never")]
    layout = Layout((2, 6))
    answers = processes.run(4, train, layout, cases)
    for number, case in enumerate(cases):
        for found in join_answers(answers, number, layout):
            assert_close(found, plain(case), str(case))


def test_frozen_layers_take_part_in_the_gradients_of_the_others(processes: ProcessPool) -> None:
    layout = Layout((3, 5))
    frozen = ((0, 1, 2), (0,), (1, 6))  # a whole stage; what is before the first norm; norms between others
    cases = [Case((5, 4), 2, mode, frozen=layers) for layers in frozen for mode in ("except_last", "never")]
    answers = processes.run(4, train, layout, cases)
    for number, case in enumerate(cases):
        for found in join_answers(answers, number, layout):
            assert_close(found, plain(case), str(case))


def ghostly() -> nn.Sequential:
    layers = build()
    layers[2] = Ghost(4).double()
    return layers


def test_a_norm_may_have_more_averages_than_features(processes: ProcessPool) -> None:
    cases = [Case(mode=mode, layers=ghostly) for mode in MODES]
    for outcomes in processes.run(2, train, Layout((8,)), cases):
        for found, case in zip(outcomes, cases, strict=True):
            assert_close(found, plain(case), str(case))
