"""The sizes of a tensor in a model's code, which note those that the code reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class TracedShape(tuple[int, ...]):  # noqa: SLOT001 - a tuple of any length has no slots
    """A shape in the code of a model. What the code does with its sizes is recorded with these numbers.

    `x.shape[0]` reads one size, and `len(x.shape)` and a text for people none. Whatever else is done with a shape may
    read all: it is unpacked, compared, or given to C++, which nobody sees.
    """

    def __init__(self, _: torch.Size) -> None:
        self._indexed: dict[int, int] = {}  # sizes by position
        self._is_read_whole = False
        self._is_looked_at = False  # without a size

    def sizes_read(self) -> tuple[int, ...]:
        """Return the sizes that were read."""
        is_whole = self._is_read_whole or not (self._indexed or self._is_looked_at)
        return tuple(self.whole()) if is_whole else tuple(self._indexed.values())

    def whole(self) -> torch.Size:
        """Return the plain shape, to be read."""
        self._is_read_whole = True
        return torch.Size(tuple.__iter__(self))

    def numel(self) -> int:
        """Return the number of elements."""
        return self.whole().numel()

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int):
            return self.whole()[key]
        size = tuple.__getitem__(self, key)
        self._indexed[key % tuple.__len__(self)] = size
        return size

    def __len__(self) -> int:
        self._is_looked_at = True
        return tuple.__len__(self)

    def __repr__(self) -> str:
        self._is_looked_at = True
        return repr(torch.Size(tuple.__iter__(self)))

    __hash__ = tuple.__hash__


def _read_whole(name: str) -> Callable[..., Any]:
    def method(self: TracedShape, *args: Any) -> Any:
        return getattr(self.whole(), name)(*args)

    return method


for _name in (
    "__iter__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__contains__",
    "__add__",
    "__mul__",
):
    setattr(TracedShape, _name, _read_whole(_name))
