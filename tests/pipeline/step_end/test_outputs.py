"""The outputs of micro-batches are put together as the mini-batch was cut, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.microbatch import Payload, find_batch_size, microbatch_sizes, replicated, split, split_along
from gpipe.pipeline.step_end.outputs import merge


@given(st.integers(1, 20), st.integers(1, 8))
def test_merge_undoes_split(batch_size: int, num_microbatches: int) -> None:
    value = {"a": torch.randn(batch_size, 2), "b": [torch.arange(batch_size), None]}
    parts = split(value, microbatch_sizes(batch_size, num_microbatches))
    merged = merge(parts, microbatch_sizes(batch_size, num_microbatches))
    assert torch.equal(merged["a"], value["a"])
    assert torch.equal(merged["b"][0], value["b"][0])
    assert merged["b"][1] is None


def test_outputs_of_different_nests_are_refused() -> None:
    with pytest.raises(ValueError, match="nested differently; return the same nest for each"):
        merge([Payload.of(torch.zeros(1)), Payload.of((torch.zeros(1),))], [1, 1])


def test_a_scalar_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^an output has the shape \(\) for a micro-batch of 1 examples; "):
        merge([Payload.of(torch.zeros(())), Payload.of(torch.zeros(()))], [1, 1])


def test_several_outputs_that_do_not_have_the_examples_first_are_refused() -> None:
    parts = [Payload.of((torch.zeros(size, 1), torch.zeros(5, size))) for size in (3, 2)]
    with pytest.raises(
        ValueError, match=r"^an output has the shape \(5, 3\) for a micro-batch of 3 examples; outputs "
    ):
        merge(parts, [3, 2])
    assert merge(parts[:1], [3])[1].shape == (5, 3)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(-3, 2))
def test_merge_undoes_split_along_any_dimension(batch_size: int, num_microbatches: int, dimension: int) -> None:
    shape = [2, 3]
    shape.insert(dimension % 3, batch_size)
    tensor, table, sizes = torch.randn(shape), torch.randn(5), microbatch_sizes(batch_size, num_microbatches)
    parts = split((split_along(tensor, dimension), replicated(table)), sizes)
    values = [part.value() for part in parts]
    assert torch.equal(torch.cat([first for first, _ in values], dimension), tensor)
    assert all(torch.equal(second, table) for _, second in values)
    assert torch.equal(merge([Payload.of(first) for first, _ in values], sizes, dimension % 3), tensor)
    assert find_batch_size((split_along(tensor, dimension), replicated(table)), "inputs") == batch_size
