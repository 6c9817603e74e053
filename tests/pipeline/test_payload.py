"""Nests are taken apart and put together again as they were; what cannot travel is refused with its place."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.pipeline.payload import Payload, PayloadError, structure_from_json, unflatten

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
def test_a_nest_is_put_together_as_it_was(nest: Any) -> None:
    assert same(Payload.of(nest).value(), nest)


@given(NESTS)
def test_a_structure_survives_json(nest: Any) -> None:
    payload = Payload.of(nest)
    read = structure_from_json(json.loads(json.dumps(payload.structure)))
    assert read == payload.structure
    assert hash(read) == hash(payload.structure)
    assert same(unflatten(read, payload.tensors), nest)


@given(NESTS)
def test_each_tensor_is_one_entry(nest: Any) -> None:
    tensors = Payload.of(nest).tensors
    assert len({id(tensor) for tensor in tensors}) == len(tensors)


def test_entries_stand_in_the_order_of_their_first_appearance() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    payload = Payload.of({"x": [b, a], "y": (b, None)})
    assert [id(tensor) for tensor in payload.tensors] == [id(b), id(a)]


def test_two_views_of_one_tensor_are_two_entries() -> None:
    tensor = torch.zeros(4)
    assert len(Payload.of((tensor, tensor.view(2, 2))).tensors) == 2


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
    with pytest.raises(PayloadError, match=f"^{re.escape(place)}.*make it a tensor, or keep it inside one layer$"):
        Payload.of(value)


def test_a_sparse_tensor_is_refused_with_its_place_and_the_remedy() -> None:
    value = (None, {"edges": torch.eye(2).to_sparse()})
    with pytest.raises(PayloadError, match=r"^the payload\[1\]\['edges'\] .*sparse_coo; .*call \.to_dense\(\) in the"):
        Payload.of(value)
