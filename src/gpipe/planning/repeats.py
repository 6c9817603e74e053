"""Profile only the first, the second and the last of a run of identical layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
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

    def is_valid(self, input_bytes: Sequence[int]) -> bool:
        """Return whether the layers of each run take and return equally much: else their inputs differ."""
        runs = (index for index, count in enumerate(self.counts) if count > 1)
        return all(input_bytes[index - 1] == input_bytes[index] == input_bytes[index + 1] for index in runs)

    def expand(self, found: Sequence[_Item]) -> list[_Item]:
        """Return what was found for each layer of the whole model, and for what follows the last."""
        counts = self.counts + [1] * (len(found) - len(self.counts))
        return [item for item, count in zip(found, counts, strict=True) for _ in range(count)]
