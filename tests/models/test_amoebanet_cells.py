"""One cell: its payload, its states, its drop-path."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models import set_drop_path
from gpipe.models.amoebanet_cells import Cell
from gpipe.models.amoebanet_genotypes import GENOTYPES

norm = partial(nn.BatchNorm2d, eps=1e-3)
KINDS = sorted(GENOTYPES)


def make_cell(variant: str, kind: str, drop_path: float = 0.0) -> Cell:
    """A cell of width 8 on a state of 6 channels and a previous state of 5."""
    torch.manual_seed(0)
    return Cell(GENOTYPES[variant, kind], 8, 6, 5, False, drop_path, norm)


def make_payload(size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    state, previous = (torch.randn(4, channels, size, size, generator=generator) for channels in (6, 5))
    return state.requires_grad_(), previous.requires_grad_()


def plain_cell(cell: Cell, state: Tensor, previous: Tensor) -> Tensor:
    """The definition, word by word: every term takes its own ReLU, and the output is collected at the end."""
    states = [cell.project_state(F.relu(state)), cell.project_previous(F.relu(previous))]
    for pair in cell.sums.values():
        terms = []
        for term in (pair.left, pair.right):
            operand = states[term.state]
            terms.append(term.operation(F.relu(operand) if term.operation.rectified_input else operand))
        states.append(terms[0] + terms[1])
    output = []
    for index in cell.concat:
        name = f"state{index}"
        output.append(cell.reduce_output[name](states[index]) if name in cell.reduce_output else states[index])
    return torch.cat(output, dim=1)


@pytest.mark.parametrize(("variant", "kind"), KINDS)
def test_a_cell_and_its_gradients_equal_the_definition(variant: str, kind: str) -> None:
    cell, expected_cell = make_cell(variant, kind), make_cell(variant, kind)
    payload, expected_payload = make_payload(), make_payload()
    output, passed_on = cell(payload)
    expected = plain_cell(expected_cell, *expected_payload)
    assert passed_on is payload[0]
    assert torch.equal(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    for got, wanted in zip(
        [*payload, *cell.parameters()], [*expected_payload, *expected_cell.parameters()], strict=True
    ):
        assert got.grad is not None and wanted.grad is not None
        # Gradients of a shared ReLU are added in another order.
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("variant", "kind"), KINDS)
def test_the_inputs_of_a_cell_are_not_written_to(variant: str, kind: str) -> None:
    payload = make_payload()
    versions = [tensor._version for tensor in payload]
    make_cell(variant, kind, drop_path=0.5)(payload)
    assert [tensor._version for tensor in payload] == versions


@pytest.mark.parametrize(("variant", "kind"), KINDS)
def test_drop_path_is_on_every_operation_but_none(variant: str, kind: str) -> None:
    cell = make_cell(variant, kind)
    for pair, terms in zip(cell.sums.values(), GENOTYPES[variant, kind].sums, strict=True):
        for built, term in zip((pair.left, pair.right), terms, strict=True):
            assert (built.drop_path is None) == (term.operation == "none")


def test_drop_path_drops_whole_examples_and_rescales_the_others() -> None:
    cell = make_cell("D", "normal")
    term = cell.sums["state2"].left.eval()
    states = [torch.randn(64, 8, 3, 3), torch.randn(64, 8, 3, 3)]
    whole = term(states, {})
    set_drop_path(cell, 0.5)
    assert torch.equal(term(states, {}), whole)
    term.drop_path.train()
    dropped = term(states, {})
    is_zero = (dropped == 0).flatten(1).all(dim=1)
    assert 0 < is_zero.sum() < 64
    assert torch.equal(dropped[~is_zero], 2 * whole[~is_zero])


@pytest.mark.parametrize("rate", [-0.1, 1.0, 30.0])
def test_a_drop_path_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"drop_path is {rate}.*\[0, 1\)"):
        set_drop_path(make_cell("D", "normal"), rate)


def test_the_first_cell_takes_the_stem_output_as_both_states() -> None:
    cell = Cell(GENOTYPES["D", "reduction"], 8, 6, None, False, 0.0, norm)
    stem = torch.randn(2, 6, 7, 7)
    output, previous = cell(stem)
    assert output.shape == (2, 24, 4, 4) and previous is stem


def test_a_previous_state_of_the_cell_s_own_width_is_taken_as_it_is() -> None:
    cell = Cell(GENOTYPES["D", "normal"], 8, 6, 8, False, 0.0, norm)
    assert not list(cell.project_previous.parameters())


def test_a_larger_previous_state_is_reduced() -> None:
    cell = Cell(GENOTYPES["D", "normal"], 8, 6, 8, True, 0.0, norm)
    output, _ = cell((torch.randn(2, 6, 4, 4), torch.randn(2, 8, 7, 7)))
    assert output.shape == (2, 32, 4, 4)
