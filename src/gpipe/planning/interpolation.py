"""Profiles for many sizes of micro-batches from two of them.

What a layer computes, moves and keeps grows with the examples in a straight line. A peak is the largest of several such
sums, so it is at most what lies between two sizes on a straight line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

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
        self._known: dict[int, list[LayerProfile]] = {}
        ordered = sorted(set(sizes))
        self._smallest = next((size for size in ordered if self._describe(size)), 0)
        self._largest = ordered[-1] if ordered else 0
        if self._largest > self._smallest > 0:
            self._describe(self._largest)

    def _describe(self, size: int) -> bool:
        try:
            self._known[size] = self._profiler(size)
        except ValueError:
            return False
        return True

    def __call__(self, size: int) -> list[LayerProfile]:
        """Return the profile of each layer and the loss.

        Raises:
            ValueError: the model cannot be run with micro-batches of that size.
        """
        ends = [self._known.get(end) for end in (self._smallest, self._largest)]
        if size not in self._known:
            if ends[0] is None or ends[1] is None or not self._smallest < size < self._largest:
                self._known[size] = self._profiler(size)
            else:
                share = (size - self._smallest) / (self._largest - self._smallest)
                found = _interpolate_all(ends[0], ends[1], share)
                self._known[size] = self._profiler(size) if found is None else found
        return self._known[size]


def _interpolate_all(
    small: Sequence[LayerProfile], large: Sequence[LayerProfile], share: float
) -> list[LayerProfile] | None:
    """Return what lies between; None where the two differ in more than numbers."""
    made: dict[tuple[int, int], LayerProfile] = {}  # equal layers share their profile
    try:
        for one, other in zip(small, large, strict=True):
            if (id(one), id(other)) not in made:
                made[id(one), id(other)] = _interpolate(one, other, share)
    except _DifferentError:
        return None
    return [made[id(one), id(other)] for one, other in zip(small, large, strict=True)]


class _DifferentError(Exception):
    """Two profiles differ in more than numbers."""


def _interpolate(one: Any, other: Any, share: float) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return one + round(share * (other - one))
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
