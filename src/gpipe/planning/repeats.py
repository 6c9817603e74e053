"""Profile only the first, the second and the last of a run of identical layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import TypeVar

from torch import nn

from gpipe.pipeline.structure import structure

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Shortened:
    """A model in which a run of more than three equal layers is its first two and its last.

    Attributes:
        layers: of the shortened model.
        counts: for each of them, how many layers of the whole model it stands for.
    """

    layers: list[nn.Module]
    counts: list[int]

    @classmethod
    def of(cls, layers: nn.Sequential) -> Shortened:
        """Shorten a model."""
        chosen: list[nn.Module] = []
        counts: list[int] = []
        for _, run in groupby(layers, key=structure):
            members = list(run)
            if len(members) > 3:
                chosen += [members[0], members[1], members[-1]]
                counts += [1, len(members) - 2, 1]
            else:
                chosen += members
                counts += [1] * len(members)
        return cls(chosen, counts)

    def is_valid(self, input_bytes: Sequence[int], offsets: Sequence[Iterable[int]]) -> bool:
        """Return whether the whole model follows from the shortened one.

        The layers of a run take and return equally much: else their inputs differ. And none of them is meant by a layer
        further away than its neighbour: which one would be meant in the whole model?

        Args:
            input_bytes: of each layer.
            offsets: of each layer, those of the layers that belong to it, such as that which made its input.
        """
        middles = [index for index, count in enumerate(self.counts) if count > 1]
        run_of = {index + step: index for index in middles for step in (-1, 0, 1)}
        return all(input_bytes[i - 1] == input_bytes[i] == input_bytes[i + 1] for i in middles) and not any(
            abs(offset) > 1 and (index + offset in middles or run_of.get(index + offset, -1) == run_of.get(index, -2))
            for index, own in enumerate(offsets)
            for offset in own
        )

    def expand(self, found: Sequence[_Item], move: Callable[[_Item, Callable[[int], int]], _Item]) -> list[_Item]:
        """Return what was found for each layer of the whole model, and for what follows the last.

        move: (an item, from an offset in the shortened model to that in the whole one) -> the item there.
        """
        counts = self.counts + [1] * (len(found) - len(self.counts))
        starts = list(accumulate(counts, initial=0))
        return [
            move(found[index], partial(_move, starts, index, place))
            for index, count in enumerate(counts)
            for place in range(starts[index], starts[index] + count)
        ]


def _move(starts: Sequence[int], index: int, place: int, offset: int) -> int:
    """Return the offset in the whole model of a layer that is at `index` in the shortened one, and here at `place`."""
    if abs(offset) <= 1:  # a neighbour stays one
        return offset
    target = index + offset
    return (starts[target] if target >= 0 else target) - place
