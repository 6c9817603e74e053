"""Compiled layers train as the others do, and are compiled as seldom as possible."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe

MODES = ("except_last", "never")  # the first has every kind of run that there is


def compilable() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)),
            nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        )
    converted = gpipe.convert_batch_norm(layers)
    assert isinstance(converted, nn.Sequential)
    return converted


class Graphs:
    """A backend of torch.compile that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.count += 1
        return graph


def pipeline_of(layers: nn.Sequential, **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, F.cross_entropy, [1] * len(layers), **{"num_microbatches": 3} | options)


# torch.compile looks at the .grad of every input, also between two layers of a plain model.
about_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@about_grad
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_train_and_evaluate_as_the_others_do(mode: str) -> None:
    torch._dynamo.reset()
    inputs = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    plain, layers = compilable(), compilable()
    pipelines = [pipeline_of(model, rematerialize=mode) for model in (plain, layers)]
    pipelines[1].compile(backend="aot_eager", fullgraph=True)
    for _, pipeline in itertools.product(range(2), pipelines):
        pipeline.train_step((inputs, torch.arange(8) % 3))
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    for found, expected in zip(layers.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)
    assert list(layers.state_dict()) == list(plain.state_dict())
    assert torch.equal(pipelines[1].evaluate(inputs), pipelines[0].evaluate(inputs))


@about_grad
def test_more_micro_batches_and_more_steps_compile_nothing_more() -> None:
    counts = set()
    for num_microbatches in (3, 6):
        torch._dynamo.reset()
        pipeline = pipeline_of(compilable(), num_microbatches=num_microbatches, rematerialize="except_last")
        pipeline.compile(backend=(graphs := Graphs()))
        for _ in range(2):
            pipeline.train_step((torch.randn(2 * num_microbatches, 3, 6, 6), torch.arange(2 * num_microbatches) % 3))
            counts.add(graphs.count)
    assert len(counts) == 1, counts


@about_grad
def test_every_layer_is_compiled_however_many_are_of_one_class() -> None:
    torch._dynamo.reset()
    widths = [4, *range(5, 17), 3]  # torch.compile would give up after 8 variants of the same code
    pipeline = pipeline_of(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))))
    pipeline.compile(backend=(graphs := Graphs()))
    pipeline.evaluate(torch.zeros(3, 4))
    assert graphs.count == len(widths) - 1
