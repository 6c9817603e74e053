"""Partitions are the exact optimum, judged by trying every cut."""

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.planning.accelerator import LayerSeconds
from gpipe.planning.exact_cut import CutObjective, partition_layers
from tests.planning.small_profiles import all_cuts

OBJECTIVES: tuple[CutObjective, ...] = ("max", "variance")
integer_costs = st.integers(0, 12)
dyadic_costs = st.floats(0, 4, width=16)
costs_lists = st.lists(integer_costs, min_size=1, max_size=9) | st.lists(dyadic_costs, min_size=1, max_size=9)


def sums(values: Sequence[float], sizes: Sequence[int]) -> list[Fraction]:
    ends = list(itertools.accumulate(sizes))
    return [sum(map(Fraction, values[end - size : end]), Fraction(0)) for end, size in zip(ends, sizes, strict=True)]


def quality(costs: Sequence[float], sizes: list[int], objective: CutObjective) -> tuple[Fraction, ...]:
    """What the best cut is smallest in: the objective, and for the maximum the sum of squares as tie-break."""
    parts = sums(costs, sizes)
    squares = sum((part**2 for part in parts), Fraction(0))
    return (max(parts), squares) if objective == "max" else (squares,)


def rank(costs: Sequence[float], sizes: list[int], objective: CutObjective) -> tuple[object, ...]:
    """Order all cuts strictly: by quality, then longer partitions at the end; if all costs are 0, they are equal."""
    return *quality(costs if any(costs) else [1] * len(costs), sizes, objective), [-size for size in reversed(sizes)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(costs=costs_lists, data=st.data())
def test_the_cut_is_the_best_of_all_cuts(objective: CutObjective, costs: list[float], data: st.DataObject) -> None:
    num_partitions = data.draw(st.integers(1, len(costs)))
    best = min(all_cuts(len(costs), num_partitions), key=lambda sizes: rank(costs, sizes, objective))
    assert partition_layers(costs, num_partitions, objective=objective) == best


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(costs=costs_lists, data=st.data())
def test_the_cut_is_the_best_of_those_within_the_memory_limit(
    objective: CutObjective, costs: list[float], data: st.DataObject
) -> None:
    num_partitions = data.draw(st.integers(1, len(costs)))
    memory = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    limit = data.draw(st.integers(0, 30))
    legal = [sizes for sizes in all_cuts(len(costs), num_partitions) if max(sums(memory, sizes)) <= limit]
    if legal:
        best = min(legal, key=lambda sizes: rank(costs, sizes, objective))
        assert best == partition_layers(
            costs, num_partitions, objective=objective, memory_bytes=memory, memory_limit_bytes=limit
        )
    else:
        with pytest.raises(ValueError, match=r"bytes"):
            partition_layers(costs, num_partitions, objective=objective, memory_bytes=memory, memory_limit_bytes=limit)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_integers_are_not_rounded_to_floats(objective: CutObjective) -> None:
    big = 2**60
    assert partition_layers([big, 1, big + 1], 2, objective=objective) == [2, 1]
    assert partition_layers([big + 1, 1, big], 2, objective=objective) == [1, 2]


def test_floats_that_differ_in_the_last_bit_are_told_apart() -> None:
    up = math.nextafter(1.0, 2.0)
    assert partition_layers([1.0, up, 1.0], 2) == [1, 2]
    assert partition_layers([up, 1.0, 1.0], 2) == [1, 2]
    assert partition_layers([1.0, 1.0, up], 2) == [2, 1]


@pytest.mark.parametrize("array", [torch.tensor, np.array])
def test_costs_may_be_an_array(array: Callable[..., Any]) -> None:
    assert partition_layers(array([1.0, 2.0, 3.0]), 2) == [2, 1]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_layers_without_cost_are_spread_evenly(objective: CutObjective) -> None:
    assert partition_layers([0] * 10, 4, objective=objective) == [2, 2, 3, 3]


def test_the_smallest_maximum_and_the_smallest_variance_can_differ() -> None:
    costs = [1, 5, 2, 3]
    assert partition_layers(costs, 3, objective="max") == [1, 1, 2]  # sums 1, 5, 5
    assert partition_layers(costs, 3, objective="variance") == [2, 1, 1]  # sums 6, 2, 3


def plain_dynamic_programme(costs: Sequence[int], num_partitions: int, objective: CutObjective) -> float:
    """Minimise the largest sum, or the sum of squares, by comparing every start of every partition: K * L^2 steps."""
    prefix = list(itertools.accumulate(costs, initial=0))
    best: list[float] = [0] + [math.inf] * len(costs)
    for _ in range(num_partitions):
        best = [
            min((extend(best[i], end - prefix[i], objective) for i in range(j)), default=math.inf)
            for j, end in enumerate(prefix)
        ]
    return best[-1]


def extend(best: float, part: int, objective: CutObjective) -> float:
    return max(best, part) if objective == "max" else best + part**2


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ["random", "one giant layer", "heavy tail", "equal"])
def test_middle_sized_problems_reach_the_optimum_of_a_plain_dynamic_programme(
    kind: str, objective: CutObjective
) -> None:
    generator = random.Random(kind)
    costs = {
        "random": [generator.randrange(1000) for _ in range(70)],
        "one giant layer": [generator.randrange(100) for _ in range(69)] + [10**5],
        "heavy tail": [int(generator.paretovariate(0.7)) for _ in range(70)],
        "equal": [3] * 70,
    }[kind]
    reached = quality(costs, partition_layers(costs, 9, objective=objective), objective)
    assert reached[0] == plain_dynamic_programme(costs, 9, objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("giant", [1, 10**9], ids=["even", "giant"])
def test_no_layer_of_1663_in_128_partitions_is_better_moved_to_its_neighbour(
    giant: int, objective: CutObjective
) -> None:
    generator = random.Random(1663)
    costs = [giant, *(generator.randrange(500, 1500) for _ in range(1662))]
    sizes = partition_layers(costs, 128, objective=objective)
    assert (len(sizes), sum(sizes), min(sizes) >= 1) == (128, 1663, True)
    reached = quality(costs, sizes, objective)
    for left, direction in itertools.product(range(127), (-1, 1)):
        moved = list(sizes)
        moved[left] += direction
        moved[left + 1] -= direction
        assert min(moved) == 0 or quality(costs, moved, objective) >= reached


COUNT = "non-empty partitions; choose a number in that range."
NO_COST = "give every layer a finite cost of at least 0."
SPLIT = "raise the limit or split that layer."
RAISE = "raise the limit or the number of partitions."


@pytest.mark.parametrize(
    ("costs", "num_partitions", "options", "message"),
    [
        ([1, 2], 0, {}, f"num_partitions is 0, but 2 layers can make from 1 to 2 {COUNT}"),
        ([1, 2], 3, {}, f"num_partitions is 3, but 2 layers can make from 1 to 2 {COUNT}"),
        ([], 1, {}, "costs is empty; give the cost of at least one layer."),
        ([1, -2], 1, {}, f"The cost of layer 1 is -2; {NO_COST}"),
        ([math.nan, 2], 1, {}, f"The cost of layer 0 is nan; {NO_COST}"),
        ([1.0, math.inf], 1, {}, f"The cost of layer 1 is inf; {NO_COST}"),
        ([1], 1, {"objective": "mean"}, 'objective is \'mean\'; choose "max" or "variance".'),
    ],
)
def test_a_wrong_argument_is_refused_in_one_sentence(
    costs: list[float], num_partitions: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        partition_layers(costs, num_partitions, **options)


@pytest.mark.parametrize(
    ("memory_bytes", "limit", "num_partitions", "message"),
    [
        ([1, 1], None, 1, "memory_limit_bytes is None; give both memory_bytes and memory_limit_bytes, or neither."),
        (None, 1, 1, "memory_bytes is None; give both memory_bytes and memory_limit_bytes, or neither."),
        ([1], 1, 1, "memory_bytes has 1 entries for 2 layers; give one per layer."),
        ([1, -1], 1, 1, "memory_bytes of layer 1 is -1; give every layer a size of at least 0."),
        (
            [1, 5000],
            4000,
            2,
            f"Layer 1 alone needs 5,000 bytes, above the limit of 4,000 bytes per partition; {SPLIT}",
        ),
        (
            [600] * 5,
            1000,
            4,
            (
                "A memory limit of 1,000 bytes per partition needs at least 5 partitions, but num_partitions is 4; "
                f"{RAISE}"
            ),
        ),
    ],
)
def test_an_impossible_memory_limit_says_which_bound_is_broken(
    memory_bytes: list[int] | None, limit: int | None, num_partitions: int, message: str
) -> None:
    num_layers = max(2, len(memory_bytes or []))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        partition_layers([1] * num_layers, num_partitions, memory_bytes=memory_bytes, memory_limit_bytes=limit)


@pytest.mark.parametrize("cost", [None, "3", LayerSeconds(1, 1, 1)])
def test_a_cost_is_a_number(cost: Any) -> None:
    with pytest.raises(
        TypeError, match=f"^The cost of layer 1 is of type {type(cost).__name__}; give numbers, such as .cost.flops for"
    ):
        partition_layers([1, cost], 2)
