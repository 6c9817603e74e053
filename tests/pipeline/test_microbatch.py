"""A mini-batch is cut as evenly as possible, without copies, and rebuilt; so are nests of tensors."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.microbatch import (
    Payload,
    PayloadError,
    find_batch_size,
    microbatch_sizes,
    replicated,
    split,
    split_along,
    unflatten,
)
from gpipe.pipeline.wire.format import read_structure


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
    parts = [part.value() for part in split(whole, [2, 2, 1])]
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert {part.untyped_storage().data_ptr() for part in parts} == {whole.untyped_storage().data_ptr()}


def test_every_tensor_of_a_nest_is_cut_and_one_that_appears_twice_stays_one() -> None:
    x, y = torch.arange(3), torch.zeros(3, 2)
    first, second = (part.value() for part in split({"x": x, "rest": (y, x, None)}, [2, 1]))
    assert first["x"] is first["rest"][1]
    assert first["rest"][2] is None
    assert second["rest"][0].shape == (1, 2)


def test_parts_keep_the_memory_format_and_lose_the_history() -> None:
    images = torch.zeros(4, 3, 2, 2, requires_grad=True).contiguous(memory_format=torch.channels_last)
    part = split(images, [3, 1])[0].value()
    assert part.is_contiguous(memory_format=torch.channels_last)
    assert not part.requires_grad


def test_a_tensor_that_appears_twice_has_its_examples_in_one_dimension() -> None:
    square = torch.zeros(4, 4)
    assert find_batch_size((square, {"again": square}), "inputs") == 4
    with pytest.raises(
        ValueError,
        match=r"^example\['again'\] appears twice, with its examples along dimension 1 and along 0; mark both",
    ):
        split({"x": split_along(square, 1), "again": square}, [2, 2])


def test_a_dimension_that_a_tensor_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dimension is 2, but the shape is \(4, 4\); give one that it has$"):
        split_along(torch.zeros(4, 4), 2)


def test_only_the_inputs_and_targets_may_say_where_the_examples_are() -> None:
    with pytest.raises(PayloadError, match="is of type Examples"):
        Payload.of((torch.zeros(1), replicated(torch.zeros(1))))


def test_a_mini_batch_needs_a_tensor_with_examples() -> None:
    with pytest.raises(ValueError, match=r"mark others with gpipe\.split_along or gpipe\.replicated$"):
        find_batch_size(replicated(torch.zeros(3)), "inputs")


def test_the_batch_size_is_the_first_dimension_of_all_tensors() -> None:
    assert find_batch_size({"ids": torch.zeros(3, 7), "mask": (torch.zeros(3), None)}, "inputs") == 3


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        (None, "no tensor"),
        (torch.zeros(0, 2), "the shapes (0, 2)"),
        (torch.tensor(1.0), "the shapes ()"),
        ((torch.zeros(2, 1), torch.zeros(3)), "the shapes (2, 1), (3,)"),
    ],
)
def test_a_mini_batch_without_a_common_number_of_examples_is_refused(value: Any, shapes: str) -> None:
    with pytest.raises(ValueError, match=f"^the inputs have {re.escape(shapes)}; every tensor needs"):
        find_batch_size(value, "inputs")


TENSORS = [torch.zeros(2), torch.ones(3, dtype=torch.int64), torch.ones(1, dtype=torch.bool), torch.zeros(())]
NESTS = st.recursive(
    st.none() | st.sampled_from(TENSORS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def same(found: Any, expected: Any) -> bool:
    """Compare types, keys in their order, and tensors by identity."""
    if isinstance(expected, torch.Tensor) or expected is None:
        return found is expected
    if type(found) is not type(expected) or len(found) != len(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return all(same(a, b) for a, b in zip(found, expected, strict=True))


@given(NESTS)
def test_a_nest_is_rebuilt_as_it_was(nest: Any) -> None:
    assert same(Payload.of(nest).value(), nest)


@given(NESTS)
def test_a_structure_survives_json(nest: Any) -> None:
    payload = Payload.of(nest)
    read = read_structure(json.loads(json.dumps(payload.structure)))
    assert read == payload.structure
    assert hash(read) == hash(payload.structure)
    assert same(unflatten(read, payload.tensors), nest)


@given(NESTS)
def test_each_tensor_is_one_entry(nest: Any) -> None:
    tensors = Payload.of(nest).tensors
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


def test_entries_are_in_the_order_of_their_first_appearance() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    payload = Payload.of({"x": [b, a], "y": (b, None)})
    assert [id(tensor) for tensor in payload.tensors] == [id(b), id(a)]


def test_two_views_of_one_tensor_are_two_entries() -> None:
    tensor = torch.zeros(4)
    assert len(Payload.of((tensor, tensor.view(2, 2))).tensors) == 2


def test_all_parts_of_a_tensor_share_its_memory() -> None:
    whole = torch.zeros(9)
    payload = Payload.of((whole, whole[1:2], whole[5:6], torch.zeros(9)))
    payload.find_shared(payload)
    assert payload.shared == [True, True, True, False]


def test_tensors_without_elements_share_nothing() -> None:
    payload = Payload.of((torch.empty(2, 0), torch.empty(2, 0)))
    payload.find_shared(payload)
    assert payload.shared == []


def test_a_gradient_is_wanted_where_the_tensor_has_a_history() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert Payload.of((torch.ones(2), weight * 2, torch.ones(2, dtype=torch.int64))).differentiable == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (1.5, "the payload is of type float (1.5);"),
        ((torch.zeros(1), 3), "the payload[1] is of type int (3);"),
        ({"a": [None, {1, 2}]}, "the payload['a'][1] is of type set ({1, 2});"),
        ([Pair(torch.zeros(1), torch.zeros(1))], "the payload[0] is of type Pair (Pair("),
        ({"a": {3: torch.zeros(1)}}, "the payload['a'] is of type dict ({3:"),
        ("words", "the payload is of type str ('words');"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_place_and_the_remedy(value: Any, place: str) -> None:
    remedy = "keep it inside one layer, or return only tensors, .*; torch.as_tensor converts numbers and"
    with pytest.raises(PayloadError, match=f"^{re.escape(place)}.*{remedy}"):
        Payload.of(value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_with_the_remedy(layout: torch.layout) -> None:
    value = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=layout)
    for take in (Payload.of, lambda value: find_batch_size(value, "payload")):
        with pytest.raises(PayloadError, match=r"^(the )?payload is .* nested; .* call \.to_padded_tensor\(0\) in the"):
            take(value)
    assert value.to_padded_tensor(0).shape == (2, 3, 2)


def test_a_sparse_tensor_is_refused_with_its_place_and_the_remedy() -> None:
    value = (None, {"edges": torch.eye(2).to_sparse()})
    with pytest.raises(PayloadError, match=r"^the payload\[1\]\['edges'\] .*sparse_coo; .*call \.to_dense\(\) in the"):
        Payload.of(value)
