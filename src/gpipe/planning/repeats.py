"""Profile only the first, the second and the last of a run of identical layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from torch import Tensor, nn

_Item = TypeVar("_Item")
_PLAIN = (bool, int, float, str, type(None))
_MODULES_OWN = ("_parameters", "_buffers", "_modules")


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


def structure(module: nn.Module) -> Hashable:
    """Return what a module is apart from the values of its tensors; equal for modules that do the same work.

    A module with an attribute that is neither a plain value nor a nest of them equals no other.
    """
    attributes = tuple(
        (name, _frozen(value)) for name, value in sorted(vars(module).items()) if name not in _MODULES_OWN
    )
    tensors = tuple(
        (name, _described(tensor)) for own in (module._parameters, module._buffers) for name, tensor in own.items()
    )
    children = tuple((name, None if child is None else structure(child)) for name, child in module._modules.items())
    return type(module), attributes, tensors, children


def _described(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(map(_frozen, value))
    return id(value)  # a function of a module is one object; anything else is taken to differ
