"""A mini-batch is cut as evenly as it can be, without copies, and put together again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.microbatch import batch_size_of, merge, microbatch_sizes, split
from gpipe.pipeline.payload import Payload


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [3, 3, 2, 2]),
        (7, 4, [2, 2, 2, 1]),
        (3, 4, [1, 1, 1]),
        (5, 1, [5]),
        (1, 32, [1]),
    ],
)
def test_sizes_are_those_counted_by_hand(batch_size: int, num_microbatches: int, sizes: list[int]) -> None:
    assert microbatch_sizes(batch_size, num_microbatches) == sizes


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_cover_the_mini_batch_evenly_and_none_is_empty(batch_size: int, num_microbatches: int) -> None:
    sizes = microbatch_sizes(batch_size, num_microbatches)
    assert sum(sizes) == batch_size
    assert len(sizes) == min(batch_size, num_microbatches)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_parts_are_views_in_order() -> None:
    whole = torch.arange(10).view(5, 2)
    parts = split(whole, [2, 2, 1])
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert {part.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}


def test_every_tensor_of_a_nest_is_cut_and_one_that_stands_there_twice_stays_one() -> None:
    x, y = torch.arange(3), torch.zeros(3, 2)
    first, second = split({"x": x, "rest": (y, x, None)}, [2, 1])
    assert first["x"] is first["rest"][1]
    assert first["rest"][2] is None
    assert second["rest"][0].shape == (1, 2)


def test_parts_keep_the_memory_format_and_lose_the_history() -> None:
    images = torch.zeros(4, 3, 2, 2, requires_grad=True).contiguous(memory_format=torch.channels_last)
    part = split(images, [3, 1])[0]
    assert part.is_contiguous(memory_format=torch.channels_last)
    assert not part.requires_grad


@given(st.integers(1, 20), st.integers(1, 8))
def test_merge_undoes_split(batch_size: int, num_microbatches: int) -> None:
    value = {"a": torch.randn(batch_size, 2), "b": [torch.arange(batch_size), None]}
    parts = split(value, microbatch_sizes(batch_size, num_microbatches))
    merged = merge([Payload.of(part) for part in parts])
    assert torch.equal(merged["a"], value["a"])
    assert torch.equal(merged["b"][0], value["b"][0])
    assert merged["b"][1] is None


def test_outputs_of_different_nests_are_refused() -> None:
    with pytest.raises(ValueError, match="nested differently; return the same nest for each"):
        merge([Payload.of(torch.zeros(1)), Payload.of((torch.zeros(1),))])


def test_a_scalar_output_is_refused() -> None:
    with pytest.raises(ValueError, match="an output is a scalar"):
        merge([Payload.of(torch.zeros(())), Payload.of(torch.zeros(()))])


def test_the_batch_size_is_the_first_dimension_of_all_tensors() -> None:
    assert batch_size_of({"ids": torch.zeros(3, 7), "mask": (torch.zeros(3), None)}, "inputs") == 3


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        (None, "no tensor at all"),
        (torch.zeros(0, 2), "(0, 2)"),
        (torch.tensor(1.0), "()"),
        ((torch.zeros(2, 1), torch.zeros(3)), "(2, 1), (3,)"),
    ],
)
def test_a_mini_batch_without_a_common_number_of_examples_is_refused(value: Any, shapes: str) -> None:
    with pytest.raises(ValueError, match=f"^the inputs have the shapes {re.escape(shapes)}; every tensor needs"):
        batch_size_of(value, "inputs")
