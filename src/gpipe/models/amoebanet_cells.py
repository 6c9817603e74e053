"""The AmoebaNet cell: one layer of the sequence.

The payload between cells is `(state, previous_state)`, the outputs of the last two cells. In training, it is
`(state, previous_state, auxiliary_logits)` from the auxiliary head on. A cell's second output is its unchanged input.
"""

import torch
from timm.layers import drop
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.amoebanet_genotypes import CellGenotype, Term
from gpipe.models.amoebanet_heads import AuxiliaryHead
from gpipe.models.amoebanet_operations import (
    Conv2d,
    ConvNorm,
    FactorizedReduction,
    Identity,
    NormFactory,
    Operation,
    make_operation,
)
from gpipe.models.checks import check_probability

CellInputs = Tensor | tuple[Tensor, ...]


def set_drop_path(module: nn.Module, rate: float) -> None:
    """Set the drop-path rate of every timm `DropPath` in `module`.

    Call it at every step: the keep probability falls linearly over training (Real et al. 2019).

    Raises:
        ValueError: the rate is not in [0, 1).
    """
    check_probability("drop_path", rate)
    for submodule in module.modules():
        if isinstance(submodule, drop.DropPath):
            submodule.drop_prob = rate


class DropPath(drop.DropPath):
    """timm's, with the rate in a buffer, so that a compiled layer works for any rate.

    Once the rate has been above 0, masks are drawn even at rate 0.
    """

    keep_probability: Tensor
    unread_in_forward = ("_rate",)  # may change at each step without changing what runs

    def __init__(self, rate: float) -> None:
        nn.Module.__init__(self)
        self.scale_by_keep = True
        self._draws = False
        self.register_buffer("keep_probability", torch.empty(()), persistent=False)
        self.drop_prob = rate

    @property
    def drop_prob(self) -> float:
        """The rate."""
        return self._rate

    @drop_prob.setter
    def drop_prob(self, rate: float) -> None:
        self._rate = rate
        self._draws = self._draws or rate > 0
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the buffer."""
        self.keep_probability.fill_(1 - self._rate)

    def forward(self, value: Tensor) -> Tensor:
        if not (self._draws and self.training):
            return value
        drawn = torch.rand(len(value), *[1] * (value.ndim - 1), device=value.device)
        mask = (drawn < self.keep_probability) / self.keep_probability
        return value * mask.to(value.dtype)


class CellTerm(nn.Module):
    """One operation on one state of a cell; every operation except `none` has drop-path."""

    def __init__(
        self, term: Term, in_channels: int, out_channels: int, stride: int, drop_path: float, norm: NormFactory
    ) -> None:
        super().__init__()
        self.state = term.state
        self.operation = make_operation(term.operation, in_channels, out_channels, stride, norm)
        self.drop_path = DropPath(drop_path) if term.operation != "none" else None

    def forward(self, states: list[Tensor], rectified: dict[int, Tensor]) -> Tensor:
        """Apply the operation to its state; `rectified` caches the ReLU of each state for the cell's other terms."""
        operand = states[self.state]
        if self.operation.rectified_input:
            if self.state not in rectified:
                rectified[self.state] = F.relu(operand)
            operand = rectified[self.state]
        output: Tensor = self.operation(operand)
        return output if self.drop_path is None else self.drop_path(output)


class Cell(nn.Module):
    """A normal or reduction cell.

    Args:
        genotype: the cell's genotype.
        channels: the width of all its states.
        state_channels: the width of the payload's state.
        previous_channels: the width of the payload's previous state. None makes the first cell, which takes the stem's
            output as its state and, unprojected, as its previous state.
        previous_is_larger: whether there is a reduction cell between the previous state and the state.
        drop_path: the initial drop-path rate.
        norm: makes the batch norms.

    Attributes:
        auxiliary_head: maps the cell's output to auxiliary logits in training mode; None for most cells.
    """

    same_without_graph = True  # like all submodules, so the engine can run without a graph what it will recompute

    def __init__(
        self,
        genotype: CellGenotype,
        channels: int,
        state_channels: int,
        previous_channels: int | None,
        previous_is_larger: bool,
        drop_path: float,
        norm: NormFactory,
    ) -> None:
        super().__init__()
        self.project_state = ConvNorm(Conv2d(state_channels, channels), norm)
        self.project_previous: Operation
        if previous_channels is not None and previous_is_larger:
            self.project_previous = FactorizedReduction(previous_channels, channels, norm)
        elif previous_channels is not None and previous_channels != channels:
            self.project_previous = ConvNorm(Conv2d(previous_channels, channels), norm)
        else:
            self.project_previous = Identity()

        widths = [channels, state_channels if previous_channels is None else channels]
        self.sums = nn.ModuleDict()
        for index, pair in enumerate(genotype.sums, start=2):
            # Only states 0 and 1 still have the size of the input.
            left, right = (
                CellTerm(term, widths[term.state], channels, genotype.stride if term.state < 2 else 1, drop_path, norm)
                for term in pair
            )
            self.sums[f"state{index}"] = nn.ModuleDict({"left": left, "right": right})
            widths.append(channels)

        self.concat = genotype.concat
        self.out_channels = channels * len(genotype.concat)
        self.reduce_output = nn.ModuleDict()
        if genotype.stride == 2:
            for index in (0, 1):
                if index in genotype.concat:
                    self.reduce_output[f"state{index}"] = FactorizedReduction(widths[index], channels, norm)
        self.auxiliary_head: AuxiliaryHead | None = None

    def forward(self, payload: CellInputs) -> tuple[Tensor, ...]:
        """Return (output, state) and, in training from the auxiliary head on, the auxiliary logits.

        The output is [n, out_channels, h, w]. A reduction cell halves h and w, rounded up. Inputs are never modified,
        because the engine recomputes from them.
        """
        state, previous, *auxiliary = (payload, payload) if isinstance(payload, Tensor) else payload
        if self.project_previous.rectified_input:
            previous = F.relu(previous)
        states: list[Tensor] = [self.project_state(F.relu(state)), self.project_previous(previous)]
        rectified: dict[int, Tensor] = {}
        for pair in self.sums.values():
            left, right = pair.children()
            states.append(left(states, rectified) + right(states, rectified))
        for name, reduction in self.reduce_output.items():
            index = int(name.removeprefix("state"))
            states[index] = reduction(states[index])
        output = torch.cat([states[index] for index in self.concat], dim=1)
        if self.auxiliary_head is not None and self.training:
            auxiliary = [self.auxiliary_head(output)]
        return (output, state, *auxiliary)
