"""Profiles for many sizes of micro-batches from a few of them.

What a layer computes, moves and keeps grows with the examples in a straight line. A peak is the largest of several such
sums, so it is at most what lies between two sizes on a straight line. Where a size in between lies on that line, so do
all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from gpipe.planning.ledger import Work
from gpipe.planning.planner import Profiler
from gpipe.planning.profile import LayerProfile


class InterpolatedProfiles:
    """Describes a model with micro-batches of any size between the smallest and the largest that it can be run with.

    Args:
        profiler: describes it in earnest, which takes seconds; raises ValueError for a size that cannot be.
        sizes: that will be asked for.
    """

    def __init__(self, profiler: Profiler, sizes: Iterable[int]) -> None:
        self._profiler = profiler
        self._described: dict[int, list[LayerProfile]] = {}
        self._interpolated: dict[int, list[LayerProfile]] = {}
        ordered = sorted(set(sizes))
        self._smallest = next((size for size in ordered if self._can_describe(size)), 0)
        self._largest = ordered[-1] if ordered else 0
        if self._largest > self._smallest > 0:
            self._can_describe(self._largest)

    def __call__(self, size: int) -> list[LayerProfile]:
        """Return the profile of each layer and the loss, interpolated between the smallest and the largest size.

        Raises:
            ValueError: the model cannot be run with micro-batches of that size.
        """
        ends = self._smallest, self._largest
        if size in self._described or not self._described.keys() >= set(ends) or not ends[0] < size < ends[1]:
            return self._describe(size)
        if size not in self._interpolated:
            self._interpolated[size] = self._interpolate(*ends, size) or self._describe(size)
        return self._interpolated[size]

    def exactly(self, size: int) -> list[LayerProfile]:
        """Return what the profiler returns for a size; it is asked where no straight line around that size is known.

        Raises:
            ValueError: the model cannot be run with micro-batches of that size.
        """
        if size not in self._described and (found := self._find_on_line(size)) is not None:
            return found
        return self._describe(size)

    def _find_on_line(self, size: int) -> list[LayerProfile] | None:
        """Return the profiles of a size among three others that are on a straight line; None where there are none."""
        below = sorted(known for known in self._described if known < size)[-2:]
        above = sorted(known for known in self._described if known > size)[:2]
        if below and above:
            for first, between, last in ((below[0], below[-1], above[0]), (below[-1], above[0], above[-1])):
                is_inside = first < between < last
                if is_inside and self._interpolate(first, last, between) == self._described[between]:
                    return self._interpolate(first, last, size)
        return None

    def _can_describe(self, size: int) -> bool:
        try:
            self._describe(size)
        except ValueError:
            return False
        return True

    def _describe(self, size: int) -> list[LayerProfile]:
        if size not in self._described:
            self._described[size] = self._profiler(size)
        return self._described[size]

    def _interpolate(self, small: int, large: int, size: int) -> list[LayerProfile] | None:
        """Return what lies between two described sizes; None where these differ in more than numbers."""
        share = _Share(size - small, large - small)
        made: dict[tuple[int, int], LayerProfile] = {}  # equal layers share their profile
        pairs = list(zip(self._described[small], self._described[large], strict=True))
        try:
            for one, other in pairs:
                if (id(one), id(other)) not in made:
                    made[id(one), id(other)] = _interpolate(one, other, share)
        except _DifferentError:
            return None
        return [made[id(one), id(other)] for one, other in pairs]


class _Share(NamedTuple):
    """A part of a length, both whole numbers: FLOPs exceed what floating-point numbers count one by one."""

    part: int
    length: int


class _DifferentError(Exception):
    """Two profiles differ in more than numbers."""


def _interpolate(one: Any, other: Any, share: _Share) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return one + share.part * (other - one) // share.length
    if is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        names = [field.name for field in fields(one)]
        return replace(one, **{name: _interpolate(getattr(one, name), getattr(other, name), share) for name in names})
    if _is_work(one) and _is_work(other) and len(one) != len(other):
        one, other = _add_up(one), _add_up(other)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        items = [_interpolate(a, b, share) for a, b in zip(one, other, strict=True)]
        return type(one)(*items) if hasattr(one, "_fields") else tuple(items)
    if one == other:
        return one
    raise _DifferentError


def _is_work(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, Work) for item in value)


def _add_up(operations: Sequence[Work]) -> tuple[Work]:
    """Return all operations as one: a loss reads the logits of more examples in more pieces."""
    return (Work(*map(sum, zip(*operations, strict=True))),) if operations else (Work(0, 0),)
