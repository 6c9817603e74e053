"""Add up the gradients of a tied parameter's copies, whatever processes hold them.

The sum is taken in layer order: it travels along the layers, from process to process, and then back to all copies.

    layer 0    g0 ------> .            .<-- sum      process 0
    layer 4               g0 + g4 --> . <-- sum      process 1
    layer 9                           + g9 --'       process 2

So its bits are the same for every number of stages. Besides the gradients themselves a process needs memory for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from gpipe.pipeline.job.topology import Processes
from gpipe.pipeline.shared.ties import Member, Tie

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
        kept = next((copy for copy in copies if copy.grad is total), copies[0])
        kept.grad = total
        for copy in copies:
            if copy is kept:
                continue
            if copy.grad is None:
                copy.grad = torch.empty_like(copy)
            copy.grad.copy_(total)

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
