"""Profiles for many sizes of micro-batches, interpolated between two of them.

What a layer computes, moves, keeps, and holds at any moment is linear in the number of examples. A peak is the highest
moment, which may differ from size to size. So if two sizes have the same operations and moments, interpolation between
them is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from gpipe.planning.ledger import Work
from gpipe.planning.observed_model import Arrival, Input, PerPass
from gpipe.planning.profile import LayerProfile

_Between = Callable[[int, int], int]
"""A number at the smaller size, and at the larger one -> the number for a size between them."""
Profiler = Callable[[int], list[LayerProfile]]
"""Size of a micro-batch -> the profile of each layer and the loss."""


class KnownProfiles:
    """Describes a model with micro-batches of any size: each size once, interpolating between two known sizes.

    Args:
        profiler: describes the model, which takes seconds; raises ValueError for a size that is not possible.
        estimates: whether to interpolate even between sizes whose operations or moments differ; otherwise only where
            interpolation is exact.
    """

    def __init__(self, profiler: Profiler, *, estimates: bool = False) -> None:
        self._profiler = profiler
        self._estimates = estimates
        self._described: dict[int, list[LayerProfile]] = {}
        self._between: dict[int, list[LayerProfile]] = {}

    def __call__(self, size: int) -> list[LayerProfile]:
        """Return the profile of each layer and the loss.

        Raises:
            ValueError: the model cannot be run with micro-batches of that size.
        """
        if size in self._described:
            return self._described[size]
        if size not in self._between:
            if (found := self._find_between(size)) is None:
                self._described[size] = self._profiler(size)
                return self._described[size]
            self._between[size] = found
        return self._between[size]

    def describe_ends(self, sizes: Iterable[int]) -> None:
        """Describe the smallest and the largest possible of some sizes: all others lie between them."""
        ordered = sorted(set(sizes))
        for inwards in (ordered, reversed(ordered)):
            for size in inwards:
                with suppress(ValueError):
                    self(size)
                    break

    def _find_between(self, size: int) -> list[LayerProfile] | None:
        """Return None if there are no two that differ in numbers alone, or if these must be exact and are not."""
        below = max((known for known in self._described if known < size), default=None)
        above = min((known for known in self._described if known > size), default=None)
        if below is None or above is None:
            return None

        def interpolate(one: int, other: int) -> int:
            """Interpolate in integers: numbers of FLOPs exceed those that floats represent exactly."""
            return one + (size - below) * (other - one) // (above - below)

        ends = list(zip(self._described[below], self._described[above], strict=True))
        made: dict[tuple[int, int], LayerProfile] = {}  # equal layers share their profile
        try:
            for one, other in ends:
                if (id(one), id(other)) not in made:
                    found = _interpolate_profile(one, other, interpolate, is_exact=not self._estimates)
                    made[id(one), id(other)] = found
        except _DifferentError:
            return None
        return [made[id(one), id(other)] for one, other in ends]


class _DifferentError(Exception):
    """Two profiles differ in more than numbers."""


def _interpolate_profile(one: LayerProfile, other: LayerProfile, between: _Between, *, is_exact: bool) -> LayerProfile:
    if not is_exact and list(map(len, one.heights)) != list(map(len, other.heights)):
        one, other = (replace(each, heights=PerPass(*((peak,) for peak in each.peaks))) for each in (one, other))
    names = [each.name for each in fields(one)]
    return replace(
        one, **{name: _interpolate(getattr(one, name), getattr(other, name), between, is_exact) for name in names}
    )


def _interpolate(one: Any, other: Any, between: _Between, is_exact: bool) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return between(one, other)
    if not is_exact and _is_work(one) and _is_work(other) and len(one) != len(other):
        one, other = _add_up(one), _add_up(other)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        if _find_layers(one) != _find_layers(other):
            raise _DifferentError
        items = [_interpolate(a, b, between, is_exact) for a, b in zip(one, other, strict=True)]
        return type(one)(*items) if hasattr(one, "_fields") else tuple(items)
    if one == other:
        return one
    raise _DifferentError


def _find_layers(value: Any) -> tuple[int | None, ...]:
    """Return the layers that an input or a gradient names; they cannot be interpolated."""
    if isinstance(value, Input):
        return value.made_by, value.freed_by, value.kept_by
    return (value.made_by,) if isinstance(value, Arrival) else ()


def _is_work(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, Work) for item in value)


def _add_up(operations: Sequence[Work]) -> tuple[Work]:
    """Return all operations as one: a loss splits the logits of more examples into more pieces."""
    return (Work(*map(sum, zip(*operations, strict=True))),) if operations else (Work(0, 0),)
