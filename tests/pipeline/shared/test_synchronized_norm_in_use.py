"""Synchronised batch norms under autocast, compiled, in evaluation, with empty parts, and where replicas disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gpipe
import gpipe._compat.torchvision  # before timm
from gpipe.pipeline.microbatch import microbatch_sizes
from tests.pipeline.shared.synchronized_case import (
    MODES,
    Case,
    Layout,
    State,
    assert_equal,
    build,
    mean_loss,
    mesh_of,
    pipeline_of,
    plain,
    train_case,
)
from tests.support.process_pool import ProcessPool

from timm.layers import BatchNormAct2d  # isort: skip


def mixed() -> nn.Sequential:
    """Return layers in channels_last whose convolutions autocast makes compute in bfloat16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Tanh()),
            nn.Sequential(nn.Conv2d(8, 8, 2, bias=False), BatchNormAct2d(8)),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        )
    return layers.to(memory_format=torch.channels_last)


MIXED = Case((5, 3), 2, layers=mixed, dtype=torch.float32)


def step_in_bfloat16(rank: int) -> tuple[list[torch.dtype], State]:
    """Train under autocast; return the types of what the norms return, and what `train` does."""
    types: list[torch.dtype] = []

    def watched() -> nn.Sequential:
        layers = mixed()
        for layer in (layers[0], layers[1]):
            layer[1].register_forward_hook(lambda _, args, output: types.append(output.dtype))
        return layers

    layout = Layout((3,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = train_case(replace(MIXED, layers=watched), layout, mesh_of(layout))
    return types, found


def test_autocast_reaches_the_norms(processes: ProcessPool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(MIXED)
    for types, found in processes.run(2, step_in_bfloat16):
        assert types == [torch.bfloat16] * 16  # two norms, two micro-batches, each of them twice, in two steps
        assert found.keys() == expected.keys()
        for name, value in expected.items():  # of 8 bits, and some values cancel
            np.testing.assert_allclose(found[name], value, rtol=0, atol=0.03 * np.abs(value).max(), err_msg=name)


def train_compiled(rank: int) -> tuple[State, State, list[int]]:
    """Train plain and compiled; return also how many graphs there were after each compiled step."""
    found, counts = [], []
    mesh = mesh_of(Layout((3,)))
    for compiled in (False, True):
        case = Case((8, 8), 4, "except_last", layers=mixed, dtype=torch.float32)
        pipeline = pipeline_of(case, Layout((3,)), mesh)
        if compiled:
            torch._dynamo.reset()
            pipeline.compile(backend=lambda graph, _: counts.append(0) or graph)
        totals = []
        for step in range(2):
            pipeline.train_step(tuple(part.split(case.sizes)[rank] for part in case.batch(step)))
            totals.append(len(counts))
        found.append({name: value.detach().numpy() for name, value in pipeline.layers.state_dict().items()})
        found[-1] |= {f"gradient of {n}": p.grad.numpy() for n, p in pipeline.named_parameters() if p.grad is not None}
        pipeline.close()
    return (*found, totals)


def test_compiled_layers_are_interrupted_by_their_norms(processes: ProcessPool) -> None:
    for plain_state, compiled_state, counts in processes.run(2, train_compiled):
        assert_equal(compiled_state, plain_state, "compiled")
        assert counts[0] == counts[1] > 0, "the second step compiled again"


def evaluate_apart(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Train a step, then evaluate in each replica as often as it likes; return what comes out, and what should."""
    case, layout = Case(), Layout((8,))
    pipeline = pipeline_of(case, layout, mesh_of(layout))
    pipeline.train_step(tuple(part.split(case.sizes)[rank] for part in case.batch()))
    inputs = case.batch(1)[0][: 3 + 4 * rank]
    found = pipeline.evaluate(inputs)
    layers = nn.Sequential(*pipeline.layers.values()).eval()
    expected = torch.cat([layers(part) for part in inputs.split(microbatch_sizes(len(inputs), case.num_microbatches))])
    for _ in range(rank):  # alone
        pipeline.evaluate(inputs)
    pipeline.close()
    return found.numpy(), expected.detach().numpy()


def test_replicas_evaluate_on_their_own(processes: ProcessPool) -> None:
    for found, expected in processes.run(2, evaluate_apart):
        assert np.array_equal(found, expected)


def find_the_infinity(rank: int) -> tuple[str, State]:
    """Train on an infinity, look for it, and train on."""
    case = Case(layers=lambda: nn.Sequential(build()[0], nn.BatchNorm2d(4).double(), *build()[1:]))
    layout = Layout((3, 6))
    pipeline = pipeline_of(case, layout, mesh_of(layout))
    inputs, targets = (part.split(case.sizes)[pipeline.job.replica_index].clone() for part in case.batch())
    spoiled = inputs * (torch.inf if pipeline.job.replica_index == 1 else 1)
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step((spoiled, targets))
    place = str(pipeline.first_non_finite((spoiled, targets)))
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.train_step((inputs, targets))
    found = {f"gradient of {n}": p.grad.numpy() for n, p in pipeline.named_parameters() if p.grad is not None}
    pipeline.close()
    return place, found


def test_a_number_that_is_not_finite_is_found_and_forgotten(processes: ProcessPool) -> None:
    expected = plain(Case(layers=lambda: nn.Sequential(build()[0], nn.BatchNorm2d(4).double(), *build()[1:])))
    for place, found in processes.run(4, find_the_infinity):
        assert place == "layer 0 (Conv2d) in stage 0, micro-batch 0 of replica 1"
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


class Rows(nn.Module):
    """Normalises some of its examples, by their first number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return torch.zeros_like(x).index_put((chosen,), self.norm(x[chosen]))


def choose_rows(rank: int, num_chosen: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | str:
    """Normalise so many rows of each replica; return the moving average beside the mean, or the error."""
    mesh = mesh_of(Layout((2,)))
    inputs = [torch.cat([torch.rand(4, 1, dtype=torch.float64) + 0.1, torch.randn(4, 2).double()], 1) for _ in range(2)]
    for x, number in zip(inputs, num_chosen, strict=True):
        x[number:, 0] = -1
    norm = Rows().double()
    norm.norm.momentum = 1.0
    layers = nn.Sequential(gpipe.convert_batch_norm(norm), nn.Linear(3, 3).double())
    pipeline = gpipe.Pipeline(layers, mean_loss, [2], 1, mesh=mesh, timeout_seconds=10, synchronize_batch_norm=True)
    try:
        pipeline.train_step((inputs[rank], torch.zeros(4, dtype=torch.long)))
    except gpipe.PipelineError as error:
        return str(error)
    chosen = torch.cat([x[:number] for x, number in zip(inputs, num_chosen, strict=True)])
    pipeline.close()
    return norm.norm.running_mean.numpy(), chosen.mean(0).numpy()


def test_a_part_may_be_empty_but_not_all_values_but_one(processes: ProcessPool) -> None:
    for found, expected in processes.run(2, seeded, choose_rows, (0, 3)):
        np.testing.assert_allclose(found, expected, rtol=1e-13)
    for found, expected in processes.run(2, seeded, choose_rows, (1, 1)):
        np.testing.assert_allclose(found, expected, rtol=1e-13)
    for message in processes.run(2, seeded, choose_rows, (0, 1)):
        assert "the batch norm sees one value per channel over all replicas" in message
        assert "stage 0, micro-batch 0, layer 0 (Rows), forward" in message


def seeded(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(rank, *args)


class Fork(nn.Module):
    """Uses another norm for positive inputs than for others."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if bool((x > 0).all()) else self.other(x)


class Recomputed(Fork):
    """Uses another norm in a recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if gpipe.is_recomputing() else self.other(x)


class ByHand(nn.BatchNorm1d):
    """Normalises without F.batch_norm."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return (input - input.mean(0)) / input.std(0)


def fail_to_synchronize(rank: int, layer: type[nn.Module]) -> str:
    layers = nn.Sequential(nn.Identity(), layer(3) if layer is ByHand else layer(), nn.Linear(3, 3))
    pipeline = gpipe.Pipeline(
        gpipe.convert_batch_norm(layers), mean_loss, [3], 2, mesh=mesh_of(Layout((3,))), timeout_seconds=10,
        synchronize_batch_norm=True,
    )  # fmt: skip
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step((torch.rand(8, 3) + 0.1 - 2 * rank, torch.zeros(8, dtype=torch.long)))
    return str(error.value)


def test_replicas_that_use_different_norms_are_told_so(processes: ProcessPool) -> None:
    for message in processes.run(2, fail_to_synchronize, Fork):
        assert "replica 0 runs the forward of layers.1.positive while replica 1 runs the forward of layers.1.other" in (
            message
        )


def test_a_recomputation_with_other_norms_is_told_so(processes: ProcessPool) -> None:
    for message in processes.run(2, fail_to_synchronize, Recomputed):
        assert "the recomputation uses other batch norms than the forward did; make the layer do the same" in message


def test_a_norm_that_cannot_be_synchronised_is_refused(processes: ProcessPool) -> None:
    for message in processes.run(2, fail_to_synchronize, ByHand):
        assert "ByHand does not call torch.nn.functional.batch_norm, the only function that can be" in message


def disagree(rank: int, other: dict[str, Any]) -> str:
    mesh = mesh_of(Layout((8,)))
    given: dict[str, Any] = {"synchronize_batch_norm": True, "num_microbatches": 4}
    given |= other if rank == 1 else {}
    with pytest.raises(ValueError, match="give every process the same") as error:
        gpipe.Pipeline(gpipe.convert_batch_norm(build()), mean_loss, [8], mesh=mesh, timeout_seconds=10, **given)
    return str(error.value)


def test_replicas_that_were_given_different_settings_are_told_so(processes: ProcessPool) -> None:
    for message in processes.run(2, disagree, {"synchronize_batch_norm": False}):
        assert (
            message == "synchronize_batch_norm is True in replica 0 and False in replica 1; give every process the same"
        )
    for message in processes.run(2, disagree, {"num_microbatches": 1}):
        assert message == "num_microbatches is 4 in replica 0 and 1 in replica 1; give every process the same"


@pytest.mark.parametrize("mode", MODES)
def test_without_replicas_nothing_changes(mode: str) -> None:
    states = [
        train_case(Case((7,), 3, mode, synchronized=synchronized), Layout((8,)), None) for synchronized in (False, True)
    ]
    assert_equal(*states, mode)
