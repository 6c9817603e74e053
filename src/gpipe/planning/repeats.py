"""Profile only the first, the second and the last of a run of identical layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from torch import nn

from gpipe.pipeline.layers.structure import structure
from gpipe.planning.observed_model import Input

if TYPE_CHECKING:
    from gpipe.planning.profile import LayerProfile


@dataclass(frozen=True)
class Shortened:
    """A model in which each run of more than three equal layers is reduced to its first two and its last.

    Attributes:
        layers: of the shortened model.
        counts: how many layers of the whole model each of them stands for.
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

    def expand(self, found: Sequence[LayerProfile]) -> list[LayerProfile] | None:
        """Return the profile of each layer of the whole model, and of the loss, from those of the shortened one.

        Return None if they cannot be derived: the layers of a run must take and return the same sizes, or their inputs
        would differ. And it must be clear which layers they name, such as those that made their inputs.
        """
        offsets = [list(_list_offsets(profile)) for profile in found]
        counts = self.counts + [1] * (len(found) - len(self.counts))
        starts = list(accumulate(counts, initial=0))
        profiles = []
        for index, count in enumerate(counts):
            named = [self._find_named(index, number, offsets) for number in range(len(offsets[index]))]
            if None in named:
                return None
            if count > 1 and len({profile.input_bytes for profile in found[index - 1 : index + 2]}) > 1:
                return None
            for place in range(starts[index], starts[index] + count):
                moved = []
                for offset, (target,) in zip(offsets[index], filter(None, named), strict=True):
                    if target is None or target < 0:  # before the first layer is the example
                        moved.append(offset if target is None else -1 - place)
                    else:
                        moved.append(starts[target] + (counts[target] - 1) * (target < index) - place)
                profiles.append(_move(found[index], moved))
        return profiles

    def _find_named(self, index: int, number: int, offsets: Sequence[Sequence[int]]) -> tuple[int | None] | None:
        """Return what a layer's offset means: (None,) for one relative to it, (a layer,), or None if unclear."""
        offset = offsets[index][number]
        target = index + offset
        if target < 0:
            return (-1,)
        run, other = self._find_run(index), self._find_run(target)
        if run is not None:
            in_run = [offsets[member] for member in range(run - 1, run + 2)]
            if len({len(own) for own in in_run}) > 1:
                return None
            of_all = [own[number] for own in in_run]
            if of_all == [offset] * 3:
                return (None,)
            if [one - of_all[0] for one in of_all] != [0, -1, -2] or other == run:
                return None
        if other is not None and target != other and (target < other) == (target < index):
            return None  # the far end of a run: it may mean that end, or the layer at that distance
        return (target,)

    def _find_run(self, index: int) -> int | None:
        """Return the layer that stands for several in the run that a layer is in; None if it is in no run."""
        return next((i for i in range(index - 1, index + 2) if 0 <= i < len(self.counts) and self.counts[i] > 1), None)


def _list_offsets(profile: LayerProfile) -> Iterator[int]:
    """Yield the offsets to other layers that a profile contains."""
    for one in profile.inputs:
        yield from (offset for offset in (one.made_by, one.freed_by, one.kept_by) if offset is not None)
    yield from (one.made_by for one in profile.arrivals)


def _move(profile: LayerProfile, offsets: Sequence[int]) -> LayerProfile:
    """Return the profile with other offsets; itself if they are the same."""
    if list(offsets) == list(_list_offsets(profile)):
        return profile
    moved = iter(offsets)
    inputs = []
    for one in profile.inputs:
        made_by, *ends = (None if offset is None else next(moved) for offset in one[1:])
        assert made_by is not None
        inputs.append(Input(one.size, made_by, *ends))
    arrivals = tuple(one._replace(made_by=next(moved)) for one in profile.arrivals)
    return replace(profile, inputs=tuple(inputs), arrivals=arrivals)
