"""Parameters that several layers share: which they are, and how each layer comes to a copy of its own.

A stage must hold what its layers compute with, wherever the other layers that share it are. So each layer gets a copy,
all with the same initial values; `tied_gradients.py` gives all copies the same gradient, which keeps them equal.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.initialization import materialize, replace_parameter
from gpipe.pipeline.job.errors import LostPeer
from gpipe.pipeline.job.watch import FOREVER, Watch

if TYPE_CHECKING:
    from gpipe.pipeline.job.topology import Processes

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


_Value = TypeVar("_Value")
_State = bool | None
"""Of a copy in a step: whether it got a gradient; None where it is frozen."""


class TiedGradients:
    """Leaves in each copy's `.grad` what a single parameter in all those layers would have there.

    Args:
        ties: of the whole model.
        layers: of this process, by index.
        owners: of each layer of the model, the process of the pipeline that has it.
        processes: of the pipeline, of which every process makes one of these; None where one plays all stages.

    Attributes:
        names: of the copies of each tied parameter of the whole model.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        layers: Mapping[int, nn.Module],
        owners: Sequence[int],
        processes: Processes | None,
    ) -> None:
        self.names = tuple(tuple(member.full_name for member in tie) for tie in ties)
        self._owners, self._processes = owners, processes
        self._index = processes.index if processes else 0
        circles = [tuple(sorted({owners[member.layer] for member in tie})) for tie in ties]
        sharers = processes.sharers(sorted({circle for circle in circles if len(circle) > 1})) if processes else {}
        own = [(tie, circle) for tie, circle in zip(ties, circles, strict=True) if self._index in circle]
        self._ties = [tie for tie, _ in own]
        self._sharers = {tie: sharers.get(circle) for tie, circle in own}
        self._peers = sorted({peer for _, circle in own for peer in circle} - {self._index})
        self._copies = {
            member: layers[member.layer].get_parameter(member.name)
            for tie in self._ties
            for member in tie
            if owners[member.layer] == self._index
        }
        self._repeated = {name for names in self.names for name in names[1:]}
        self._earlier: dict[Member, Tensor] = {}

    def once(self, named: Iterable[tuple[str, _Value]]) -> Iterator[tuple[str, _Value]]:
        """Yield what belongs to parameters of the whole model, each tied one once: under its first layer's name."""
        return ((name, value) for name, value in named if name not in self._repeated)

    def start_step(self) -> None:
        """Set aside the gradients of earlier steps, which are sums already."""
        self._earlier = {}
        for member, parameter in self._copies.items():
            if parameter.requires_grad and parameter.grad is not None:
                self._earlier[member], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def finish_step(self) -> None:
        """Replace the gradients of this step by their sums, and add those of earlier steps.

        A copy without a gradient counts as zero; where no copy has one, none gets one.

        Raises:
            ValueError: some copies of a parameter are frozen and some are not.
            LostPeer, PeerFailure: another process is gone, or failed.
        """
        states = self._states()
        for tie in self._ties:
            _refuse_partly_frozen(tie, states)
            if present := [member for member in tie if states[member]]:
                self._hand_out(tie, self._sum(tie, present))
        for member, earlier in self._earlier.items():
            parameter = self._copies[member]
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = {}

    def _states(self) -> dict[Member, _State]:
        """Return the state of every copy of this process's ties; what the others hold is asked of them."""
        states: dict[Member, _State] = {
            member: parameter.grad is not None if parameter.requires_grad else None
            for member, parameter in self._copies.items()
        }
        if self._processes is None or not self._peers:
            return states
        messenger = self._processes.messenger
        own = [[*member, state] for member, state in states.items()]
        for peer in self._peers:
            messenger.send(own, peer)
        for peer in self._peers:
            states |= {Member(layer, name): state for layer, name, state in messenger.receive(peer)}
        return states

    def _sum(self, tie: Tie, present: Sequence[Member]) -> Tensor:
        """Return the sum of the gradients; its memory may be that of a copy's gradient."""
        total: Tensor | None = None
        holder = self._owners[present[0].layer]
        for member in present:
            owner = self._owners[member.layer]
            if owner != holder:
                total = self._carry(tie, total, holder, owner)
                holder = owner
            if owner == self._index:
                gradient = self._gradient(member)
                total = gradient if member is present[0] or total is None else total.add_(gradient.to(total.device))
        if (sharers := self._sharers[tie]) is not None:
            total = self._empty(tie) if total is None else total
            sharers.broadcast(total, holder)
        assert total is not None
        return total

    def _carry(self, tie: Tie, total: Tensor | None, holder: int, owner: int) -> Tensor | None:
        """Bring the sum from one process to another; its memory here serves again where it comes back."""
        sharers = self._sharers[tie]
        assert sharers is not None
        if total is not None and self._index == holder:
            sharers.send(total, owner)
        elif self._index == owner:
            total = self._empty(tie) if total is None else total
            sharers.receive(total, holder)
        return total

    def _hand_out(self, tie: Tie, total: Tensor) -> None:
        """Give each of this process's copies the sum, in memory of its own."""
        copies = [self._copies[member] for member in tie if member in self._copies]
        kept = next((one for one in copies if one.grad is total), copies[0])
        kept.grad = total
        for one in copies:
            if one is kept:
                continue
            if one.grad is None:
                one.grad = torch.empty_like(one)
            one.grad.copy_(total)

    def _gradient(self, member: Member) -> Tensor:
        gradient = self._copies[member].grad
        assert gradient is not None
        return gradient

    def _empty(self, tie: Tie) -> Tensor:
        return torch.empty_like(next(self._copies[member] for member in tie if member in self._copies))


def _refuse_partly_frozen(tie: Tie, states: Mapping[Member, _State]) -> None:
    frozen = [member.full_name for member in tie if states[member] is None]
    trained = [member.full_name for member in tie if states[member] is not None]
    if frozen and trained:
        raise ValueError(
            f"{frozen[0]} is frozen, but {trained[0]}, which is one parameter with it, is not; freeze all layers' "
            "copies of it (requires_grad_(False)), or none"
        )


class Sharers:
    """This process and those of its pipeline that hold copies of the same parameters.

    A transfer has ended when its call returns, on CUDA too: who waits in vain is then known to wait.

    Args:
        group: these processes, on the backend that carries tensors.
        members: which processes of the pipeline they are, ascending.
        device: where this process computes.
        watch: ends a wait that is in vain.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], device: torch.device, watch: Watch) -> None:
        self._group = group
        self._ranks = dict(zip(members, dist.get_process_group_ranks(group), strict=True))  # in the job
        self._device = device
        self._watch = watch

    def send(self, tensor: Tensor, process: int) -> None:
        """Send a tensor to one of them.

        Raises:
            LostPeer: a connection is gone.
            PeerFailure: another process failed.
        """
        part, rank = _bytes(tensor), self._ranks[process]
        with self._exchange([rank]):
            self._wait(self._group.send([part], dist.get_group_rank(self._group, rank), 0))

    def receive(self, into: Tensor, process: int) -> None:
        """Wait for a tensor of one of them; raises what `send` does."""
        rank = self._ranks[process]
        with _filled(into) as part, self._exchange([rank]):
            self._wait(self._group.recv([part], dist.get_group_rank(self._group, rank), 0))

    def broadcast(self, tensor: Tensor, process: int) -> None:
        """Give all of them the values that the tensor has in one of them; raises what `send` does."""
        source = self._ranks[process]
        is_source = source == dist.get_rank()
        others = [rank for rank in self._ranks.values() if rank != dist.get_rank()] if is_source else [source]
        with _filled(tensor) as part, self._exchange(others):
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = dist.get_group_rank(self._group, source), FOREVER
            self._wait(self._group.broadcast([part], options))

    def _wait(self, work: dist.Work) -> None:
        """Wait as long as the watch allows: Gloo would give up by itself, before anybody knows why."""
        if self._device.type == "cuda":
            work.wait()  # the stream waits; see `_exchange`
        else:
            work.wait(FOREVER)

    @contextmanager
    def _exchange(self, ranks: Sequence[int]) -> Iterator[None]:
        with self._watch.waiting_for(ranks), LostPeer.named(ranks):
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        self._watch.check()  # a wait on the device that was cut off ends without an error


def _bytes(tensor: Tensor) -> Tensor:
    """Return the values as bytes, in the order of the dimensions: no backend knows all types of torch."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@contextmanager
def _filled(tensor: Tensor) -> Iterator[Tensor]:
    """Give the values of a tensor as bytes, and take them over into it, however it lies in memory."""
    part = _bytes(tensor)
    yield part
    if not tensor.is_contiguous():
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
