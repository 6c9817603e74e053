"""Parameters that several layers share: which they are, and how each layer comes to a copy of its own.

A stage must hold what its layers compute with, wherever the other layers that share it are. So each layer gets a copy,
all with the same initial values; `tied_gradients.py` gives all copies the same gradient, which keeps them equal.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Container, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.initialization import materialize, replace_parameter

_MARK = "_gpipe_tie"  # an attribute of all copies, so that layers that went through a pipeline are still known as tied


class Member(NamedTuple):
    """One layer's copy of a tied parameter: the layer's index, and the first name that the parameter has in there."""

    layer: int
    name: str

    @property
    def full_name(self) -> str:
        """The name in the whole model."""
        return f"layers.{self.layer}.{self.name}"


Tie: TypeAlias = tuple[Member, ...]
"""The copies of one parameter, at least two, in layer order; each layer has one."""


class Ties:
    """The parameters that are one and the same object in several layers of a model.

    What one layer alone uses in several places stays as it is.

    Args:
        layers: the whole model, on the meta device or a real one.

    Attributes:
        all: the ties, in the order of their first layers; the same for every number of stages.

    Raises:
        ValueError: two layers share a batch norm.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        places: dict[int, list[Member]] = {}
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                places.setdefault(id(getattr(parameter, _MARK, parameter)), []).append(Member(index, name))
        self.all: tuple[Tie, ...] = tuple(tuple(members) for members in places.values() if len(members) > 1)
        if self.all:
            _refuse_shared_batch_norms(layers)

    def settings(self) -> dict[str, Any]:
        """Return, as JSON, what all processes must agree on: the ties, and the values that they begin with."""
        found: dict[str, Any] = {"tied parameters": [[member.full_name for member in tie] for tie in self.all]}
        for first, *_ in self.all:
            value = self._parameter(first)
            found[f"the checksum of {first.full_name}, a tied parameter,"] = None if value.is_meta else checksum(value)
        return found

    def build(self, devices: Mapping[int, torch.device], seed: int) -> dict[int, nn.Module]:
        """Put layers on their devices with their initial weights, each with its own copies of tied parameters.

        The first layer of a tie decides about the values. Where it was described on the meta device and belongs to
        another process, a copy of it is built here for a moment: initial weights are a function of seed and index.

        Args:
            devices: of this process's layers, by index; only these are changed, in place.
            seed: of the run.
        """
        later = {member: tie for tie in self.all for member in tie[1:]}
        needed = set(devices)
        for member in sorted(later, reverse=True):  # a layer that is needed only for its values may need others
            if member.layer in needed and self._parameter(later[member][0]).is_meta:
                needed.add(later[member][0].layer)
        self._separate(later, devices)
        # Before any memory is taken, and before a module that two layers share gets some.
        pending = {i: self._layers[i] if i in devices else copy.deepcopy(self._layers[i]) for i in sorted(needed)}
        values: dict[Tie, Tensor] = {}
        built: dict[int, nn.Module] = {}
        for index in sorted(needed):
            layer = pending.pop(index)
            given = {
                member.name: values[tie] for member, tie in later.items() if member.layer == index and tie in values
            }
            layer = materialize(layer, index, seed, devices.get(index, torch.device("cpu")), given)
            values |= {tie: layer.get_parameter(tie[0].name).detach() for tie in self.all if tie[0].layer == index}
            if index in devices:
                built[index] = layer
        self._mark()
        return {index: built[index] for index in devices}

    def _separate(self, later: Mapping[Member, Tie], own: Container[int]) -> None:
        """Give this process's layers modules and parameters that no other layer has."""
        if not later:
            return
        seen: set[int] = set()
        for index, layer in enumerate(self._layers):
            if index in own:
                memo: dict[int, Any] = {id(parameter): parameter for parameter in layer.parameters()}
                self._layers[index] = _without_shared_modules(layer, seen, memo)
            seen |= {id(module) for module in layer.modules()}
        for member, tie in later.items():
            if member.layer in own:
                self._separate_parameter(member, tie[0])

    @torch.no_grad()
    def _separate_parameter(self, member: Member, first: Member) -> None:
        value, parameter = self._parameter(first), self._parameter(member)
        if parameter is value:
            new = Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            replace_parameter(self._layers[member.layer], parameter, new)
        elif not (value.is_meta or parameter.is_meta):  # they were separated for an earlier pipeline
            parameter.copy_(value)

    def _mark(self) -> None:
        for tie in self.all:
            mark = object()
            for member in tie:
                setattr(self._parameter(member), _MARK, mark)

    def _parameter(self, member: Member) -> Parameter:
        return self._layers[member.layer].get_parameter(member.name)


def tied_parameters(layers: nn.Sequential) -> list[int]:
    """Return of each layer how many of its parameters an earlier layer has too: the model has them once."""
    ties = Ties(layers)
    counts = [0] * len(layers)
    for _, *others in ties.all:
        for member in others:
            counts[member.layer] += layers[member.layer].get_parameter(member.name).numel()
    return counts


def checksum(tensor: Tensor) -> int:
    """Return a number that tells the values of one tensor from those of another."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _without_shared_modules(module: nn.Module, seen: Container[int], memo: dict[int, Any]) -> nn.Module:
    """Return a layer, or a module in it, in which each module that an earlier layer has too is replaced by a copy."""
    if id(module) in seen:
        holds_something = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        return copy.deepcopy(module, memo) if holds_something else module
    for name, child in list(module._modules.items()):
        if child is not None and (own := _without_shared_modules(child, seen, memo)) is not child:
            setattr(module, name, own)
    return module


def _refuse_shared_batch_norms(layers: nn.Sequential) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if not isinstance(module, MicroBatchNorm):
                continue
            first, first_name = owners.setdefault(id(module), (index, name))
            if first != index:
                one, other = (
                    ".".join(filter(None, ("layers", str(i), n))) for i, n in ((first, first_name), (index, name))
                )
                raise ValueError(
                    f"{one} and {other} are one batch norm, whose moving averages two layers cannot share; give each "
                    "its own"
                )
