"""Parameters that several layers share: a copy for each layer, with the same values and the same gradients.

A stage must hold what its layers compute with, wherever the other layers of a tied group are. So `TiedParameters` gives
each layer a copy. In each step `TiedGradients` gives all copies the sum of their gradients, which keeps them equal. The
sum is taken in layer order: each process adds its part to what the one before has broadcast.

    layer 0    g0 --> .             .        sum      process 0
    layer 4    .      g0 + g4 ----> .        sum      process 1
    layer 9    .      .             + g9 --> sum      process 2

So its bits are the same for every number of stages. Besides the gradients themselves, a process needs memory for one.

A change of only one copy makes them differ, such as by an optimizer that lacks some of them, or has them in different
groups. So each step adds up the bits of each copy, and all processes compare the sums at its end.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.checks.refusals import refuse_gradient_types
from gpipe.pipeline.job.job import Job
from gpipe.pipeline.layers.initialization import materialize, replace_parameter
from gpipe.pipeline.layers.structure import TIES

_Value = TypeVar("_Value")


class Member(NamedTuple):
    """One layer's copy of a tied parameter: the layer's index, and the parameter's first name in that layer."""

    layer: int
    name: str

    @property
    def full_name(self) -> str:
        """The name in the whole model."""
        return f"layers.{self.layer}.{self.name}"


TiedGroup: TypeAlias = tuple[Member, ...]
"""The copies of one parameter, at least two, in layer order; each layer has one."""


class TiedParameters:
    """The parameters that are one object, or share memory, in several layers of a model.

    A parameter that only one layer uses, in several places, stays as it is.

    Args:
        layers: the whole model, on the meta device or a real one.

    Attributes:
        groups: in the order of their first layers; the same for every number of stages.

    Raises:
        ValueError: two layers share a batch norm, or a parameter that they share has a hook.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers
        marks = {id(parameter): mark for own in layers.modules() for parameter, mark in own.__dict__.get(TIES, ())}
        found: dict[Hashable, list[Member]] = {}
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                found.setdefault(marks.get(id(parameter)) or _identify(parameter), []).append(Member(index, name))
        self.groups: tuple[TiedGroup, ...] = tuple(tuple(members) for members in found.values() if len(members) > 1)
        _refuse_shared_batch_norms(layers)
        for first, *_ in self.groups:
            _refuse_hooks(first, self._parameter(first))
        copies = ((member.full_name, self._parameter(member)) for group in self.groups for member in group)
        refuse_gradient_types(copies, "of which other layers have a part")
        self._firsts = [first for first, *_ in found.values()]

    def settings(self) -> dict[str, Any]:
        """Return, of JSON's types, what all processes must agree on: the groups, and their initial values."""
        found: dict[str, Any] = {"tied parameters": [[member.full_name for member in group] for group in self.groups]}
        for first, *_ in self.groups:
            value = self._parameter(first)
            found[f"the checksum of {first.full_name}, a tied parameter,"] = None if value.is_meta else checksum(value)
        return found

    def build(self, devices: Mapping[int, torch.device], seed: int) -> dict[int, nn.Module]:
        """Put layers on their devices with their initial weights, each with its own copies of tied parameters.

        All copies of a group get the values of its first layer. If that layer was described on the meta device and
        belongs to another process, a temporary copy of it is built here: initial weights depend on seed and index.

        Args:
            devices: of this process's layers, by index; only these are changed, in place.
            seed: of the run.

        Raises:
            ValueError: two parameters that are not tied share memory, which they would no longer do.
        """
        self._refuse_overlaps(devices)
        later = {member: first for first, *others in self.groups for member in others}
        needed = set(devices)
        for member in sorted(later, reverse=True):  # a layer that is needed only for its values may need others
            if member.layer in needed and self._parameter(later[member]).is_meta:
                needed.add(later[member].layer)
        self._separate(later, devices)
        # Before any memory is taken, and before a module that two layers share gets some.
        temporary = {index: copy.deepcopy(self._layers[index]) for index in needed.difference(devices)}
        values: dict[Member, Tensor] = {}
        for index in sorted(needed):
            layer = self._layers[index] if index in devices else temporary.pop(index)
            given = {m.name: values[first] for m, first in later.items() if m.layer == index and first in values}
            materialize(layer, index, seed, devices.get(index, torch.device("cpu")), given)
            firsts = [first for first, *_ in self.groups if first.layer == index]
            values |= {first: layer.get_parameter(first.name).detach() for first in firsts}
        for module in self._layers.modules():
            module.__dict__.pop(TIES, None)
        for group in self.groups:
            mark = object()
            for member in group:
                owner = self._layers[member.layer].get_submodule(member.name.rpartition(".")[0])
                owner.__dict__.setdefault(TIES, []).append((self._parameter(member), mark))
        return {index: self._layers[index] for index in devices}

    def _refuse_overlaps(self, devices: Mapping[int, torch.device]) -> None:
        found = ((self._parameter(first), first) for first in self._firsts)
        places = ((p.data_ptr(), p.nbytes, first) for p, first in found if _has_memory(p) and p.is_contiguous())
        end, last = 0, None
        for begin, size, member in sorted(places):
            if last is not None and begin < end and devices.get(last.layer) != devices.get(member.layer):
                raise ValueError(
                    f"{last.full_name} and {member.full_name} share memory, but are not one parameter, so one would "
                    "not see changes to the other in another process or on another device; make them one parameter, "
                    "or give each memory of its own (.clone())"
                )
            if begin + size > end:
                end, last = begin + size, member

    def _separate(self, later: Mapping[Member, Member], own: Container[int]) -> None:
        """Give this process's layers modules and parameters that no other layer has."""
        if not later:
            return
        seen: set[int] = set()
        for index, layer in enumerate(self._layers):
            if index in own:
                memo: dict[int, Any] = {id(parameter): parameter for parameter in layer.parameters()}
                self._layers[index] = _copy_shared_modules(layer, seen, memo)
            seen |= {id(module) for module in layer.modules()}
        for member, first in later.items():
            if member.layer in own:
                self._separate_parameter(member, first)

    @torch.no_grad()
    def _separate_parameter(self, member: Member, first: Member) -> None:
        value, parameter = self._parameter(first), self._parameter(member)
        if _identify(parameter) == _identify(value):
            new = Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            new.__dict__.update(value.__dict__)  # such as attributes by which an optimizer groups parameters
            replace_parameter(self._layers[member.layer], parameter, new)
        elif not (value.is_meta or parameter.is_meta):  # they were separated for an earlier pipeline
            parameter.copy_(value)

    def _parameter(self, member: Member) -> Parameter:
        return self._layers.get_parameter(f"{member.layer}.{member.name}")  # a layer of TorchScript has no such method


def _identify(parameter: Parameter) -> Hashable:
    """Return what identifies a parameter: two objects in the same memory, such as by `.data`, are one.

    A frozen and a trained parameter are two: they have different gradients.
    """
    if not _has_memory(parameter):
        return id(parameter)
    place = parameter.device, parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()
    return *place, parameter.requires_grad


def _has_memory(parameter: Parameter) -> bool:
    """Return whether a parameter has plain memory: lazy ones and those of tensor subclasses have none."""
    return type(parameter) is Parameter and not parameter.is_meta and parameter.data_ptr() != 0


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's values."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def add_up_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers, modulo 2^52: exact in float64 and in any order."""
    flat = tensor.detach().contiguous().view(-1)
    ends = flat.nbytes, flat.storage_offset() * flat.itemsize
    kinds = torch.int64, torch.int32, torch.int16, torch.uint8
    widest = next(kind for kind in kinds if all(end % kind.itemsize == 0 for end in ends))
    return flat.view(widest).sum(dtype=torch.int64).bitwise_and_(2**52 - 1).double()


def _copy_shared_modules(module: nn.Module, seen: Container[int], memo: dict[int, Any]) -> nn.Module:
    """Return a layer, or a module in it, in which copies replace the modules that an earlier layer has too."""
    if id(module) in seen:
        holds_something = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        return copy.deepcopy(module, memo) if holds_something else module
    for name, child in list(module._modules.items()):
        if child is not None and (own := _copy_shared_modules(child, seen, memo)) is not child:
            setattr(module, name, own)
    return module


def _refuse_shared_batch_norms(layers: nn.Sequential) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules(prefix=f"layers.{index}"):
            first, first_name = owners.setdefault(id(module), (index, name))
            if isinstance(module, MicroBatchNorm) and first != index:
                raise ValueError(
                    f"{first_name} and {name} are one batch norm, whose moving averages two layers cannot share; give "
                    "each its own"
                )


def _refuse_hooks(member: Member, parameter: Parameter) -> None:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"{member.full_name} has a hook, and other layers share this parameter: the hook would see the gradient of "
            "one layer, not the sum over all; change .grad after the step instead"
        )


class TiedGradients:
    """Leaves in each copy's `.grad` what a single parameter in all those layers would have there.

    Every process of the job makes one. `owners` has, for each layer of the model, the process of the pipeline that has
    it.

    Attributes:
        names: the full names of the copies of each tied parameter in the whole model.
        bits: the sum of the bits of each of this process's copies when the step began, by full name; on its device.
    """

    def __init__(
        self, groups: Sequence[TiedGroup], layers: Mapping[int, nn.Module], owners: Sequence[int], job: Job
    ) -> None:
        self.names = tuple(tuple(member.full_name for member in group) for group in groups)
        self._layers, self._owners, self._job = layers, owners, job
        holders = {group: tuple(sorted({owners[member.layer] for member in group})) for group in groups}
        self._peers = job.connect_tied(sorted({processes for processes in holders.values() if len(processes) > 1}))
        self._holders = {group: processes for group, processes in holders.items() if job.process in processes}
        self._copies: dict[Member, Parameter] = {}
        self._repeated = {name for names in self.names for name in names[1:]}
        self._earlier: dict[Member, Tensor] = {}
        self.bits: dict[str, Tensor] = {}

    def deduplicate(self, named: Iterable[tuple[str, _Value]]) -> Iterator[tuple[str, _Value]]:
        """Yield the values with each tied parameter only once, under its first layer's name."""
        return ((name, value) for name, value in named if name not in self._repeated)

    def start_step(self) -> None:
        """Set aside the gradients of earlier steps, which are already sums.

        Raises:
            ValueError: a copy has a hook now, or is gone from its layer.
        """
        self._copies = self._find_copies()
        self.bits = {member.full_name: add_up_bits(parameter) for member, parameter in self._copies.items()}
        self._earlier = {}
        for member, parameter in self._copies.items():
            _refuse_hooks(member, parameter)
            if parameter.grad is not None:
                self._earlier[member], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def finish_step(self) -> None:
        """Replace the gradients of this step by their sums, and add those of earlier steps.

        A copy without a gradient counts as zero; if no copy has one, none gets one.

        Raises:
            ValueError: some copies of a parameter are frozen and some are not.
            LostPeer, PeerFailure: another process is gone or has failed.
        """
        # Whether each copy in all processes got a gradient; None if it is frozen.
        own = [(*member, p.grad is not None if p.requires_grad else None) for member, p in self._copies.items()]
        parts = self._job.gather(own) if self.names else []
        states = {Member(layer, name): state for part in parts for layer, name, state in part}
        for group in self._holders:
            _refuse_partly_frozen(group, states)
            if present := [member for member in group if states[member]]:
                self._hand_out(group, self._sum(group, present))
        for member, earlier in self._earlier.items():
            parameter = self._copies[member]
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = {}

    def refuse_parted(self, bits: Iterable[Mapping[str, float]]) -> None:
        """Refuse copies that were not equal.

        bits: the sums of each process.
        """
        of_all = {name: value for part in bits for name, value in part.items()}
        for first, *others in self.names:
            for other in others:
                if of_all[other] != of_all[first]:
                    raise ValueError(
                        f"{first} and {other} are copies of one tied parameter and were not equal when the step began; "
                        "give an optimizer all of pipeline.parameters(), the copies (pipeline.ties) in one group, "
                        "change values in all of them, and let no forward change one"
                    )

    def _find_copies(self) -> dict[Member, Parameter]:
        """Return this process's copies as they are now: `load_state_dict(..., assign=True)` replaces them."""
        own = (m for group in self._holders for m in group if self._owners[m.layer] == self._job.process)
        try:
            return {member: self._layers[member.layer].get_parameter(member.name) for member in own}
        except AttributeError as error:
            raise ValueError(
                f"a tied parameter is gone from its layer: {error}; change layers before the pipeline is built"
            ) from None

    def _sum(self, group: TiedGroup, present: Sequence[Member]) -> Tensor:
        """Return the sum of the gradients; its memory may be that of a copy's gradient."""
        total: Tensor | None = None
        holders, process = self._holders[group], self._job.process
        owners = [self._owners[member.layer] for member in present]
        for member, owner, following in zip(present, owners, [*owners[1:], None], strict=True):
            if owner == process:
                gradient = self._copies[member].grad
                assert gradient is not None
                total = gradient if total is None else total.add_(gradient.to(total.device))
            if len(holders) == 1 or owner == following:
                continue
            # To the next owner, and the whole sum to all; of two processes, all are the other one.
            target = None if following is None or len(holders) == 2 else holders.index(following)
            if target is None or process in (owner, following):
                if total is None:
                    total = torch.empty_like(next(self._copies[member] for member in group if member in self._copies))
                self._peers[holders].broadcast(total, holders.index(owner), target)
        assert total is not None
        return total

    def _hand_out(self, group: TiedGroup, total: Tensor) -> None:
        """Give each of this process's copies the sum, in its own memory."""
        copies = [self._copies[member] for member in group if member in self._copies]
        kept = next((one for one in copies if one.grad is total), copies[0])
        kept.grad = total
        for one in copies:
            if one is not kept:
                one.grad = torch.empty_like(one) if one.grad is None else one.grad
                one.grad.copy_(total)


def _refuse_partly_frozen(group: TiedGroup, states: Mapping[Member, bool | None]) -> None:
    frozen = [member.full_name for member in group if states[member] is None]
    trained = [member.full_name for member in group if states[member] is not None]
    if frozen and trained:
        raise ValueError(
            f"{frozen[0]} is frozen, but {trained[0]}, which is the same parameter, is not; freeze all layers' copies "
            "of it (requires_grad_(False)), or none"
        )
