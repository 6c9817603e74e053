"""The shape of a tensor in a model's code, which notes the sizes that the code reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch


class _Size:
    """A size as C++ sees it: C++ reads the items of a tuple without calling its methods."""

    shape: TracedShape

    def __init__(self, size: int) -> None:
        self.size = size

    def __index__(self) -> int:
        self.shape.whole()
        return self.size

    def __eq__(self, other: object) -> bool:
        return self.__index__() == other

    __hash__ = None  # type: ignore[assignment]


class TracedShape(tuple[Any, ...]):  # noqa: SLOT001 - a tuple of any length has no slots
    """A shape in the code of a model; the code computes with its actual sizes.

    `x.shape[0]` reads one size; `len(x.shape)` and printing read none. Anything else may read all sizes: unpacking,
    comparing, or passing the shape to C++.
    """

    def __new__(cls, sizes: torch.Size) -> Self:
        """Hold the sizes as items that note when they are read."""
        return super().__new__(cls, map(_Size, sizes))

    def __init__(self, _: torch.Size) -> None:
        self._indexed: dict[int, int] = {}  # sizes by position
        self._is_read_whole = False
        for size in tuple.__iter__(self):
            size.shape = self

    def sizes_read(self) -> tuple[int, ...]:
        """Return the sizes that were read."""
        return tuple(self.whole()) if self._is_read_whole else tuple(self._indexed.values())

    def whole(self) -> torch.Size:
        """Return the plain shape, all of which counts as read."""
        self._is_read_whole = True
        return self._plain()

    def _plain(self) -> torch.Size:
        return torch.Size(size.size for size in tuple.__iter__(self))

    def numel(self) -> int:
        """Return the number of elements."""
        return self.whole().numel()

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int):
            return self.whole()[key]
        size = tuple.__getitem__(self, key).size
        self._indexed[key % len(self)] = size
        return size

    def __repr__(self) -> str:
        return repr(self._plain())


def _read_whole(name: str) -> Callable[..., Any]:
    def method(self: TracedShape, *args: Any) -> Any:
        return getattr(self.whole(), name)(*args)

    return method


_OPERATORS = ("iter", "eq", "ne", "lt", "le", "gt", "ge", "contains", "add", "radd", "mul", "rmul", "hash", "reduce_ex")
for _name in (*(f"__{_operator}__" for _operator in _OPERATORS), "count", "index"):
    setattr(TracedShape, _name, _read_whole(_name))
