"""The timing of layers: each distinct one once, the model left as it is."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.schedule import Kind
from gpipe.planning.timing import LayerTimer

CPU = torch.device("cpu")
sgd = partial(torch.optim.SGD, lr=0.1)


class Counting(nn.Linear):
    """Counts how often one of its class runs."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        Counting.calls += 1
        return super().forward(input)


def test_equal_layers_with_equal_inputs_are_timed_once_also_of_another_model() -> None:
    with torch.device("meta"):
        deep = nn.Sequential(*(Counting(4, 4) for _ in range(6)), Counting(4, 3))
        shallow = nn.Sequential(*(Counting(4, 4) for _ in range(2)), Counting(4, 3))
    timer = LayerTimer(CPU, 2, sgd)
    example = torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    Counting.calls = 0
    found = timer.time(deep, F.cross_entropy, example)
    assert Counting.calls == 2 * 3 * 2, "two layers, three rounds, forward and recomputation"
    assert len(found) == 8 and found[:6] == [found[0]] * 6
    assert timer.time(shallow, F.cross_entropy, example)[:-1] == found[:2] + found[6:7]
    assert Counting.calls == 12
    timer.time(shallow, F.cross_entropy, (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)))
    assert Counting.calls == 24, "other inputs are another case"


@pytest.mark.parametrize("splits", [False, True])
def test_the_parts_of_a_split_backward_are_timed_where_they_are_asked_for(splits: bool) -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    example = torch.randn(128, 64), torch.randn(128, 64)
    first, norm, last, loss = LayerTimer(CPU, 1, splits=splits).time(layers, F.mse_loss, example)
    for timing in (first, last):
        seconds = timing.seconds
        assert (seconds.weights > 0) == (seconds.splitting != 0) == splits
        assert seconds.weights < seconds.backward + seconds.splitting or not splits
        parts = seconds.of(Kind.INPUT_GRADIENTS) + seconds.of(Kind.WEIGHT_GRADIENTS)
        assert parts == pytest.approx(seconds.of(Kind.BACKWARD) + seconds.splitting)
    assert norm.seconds.weights < max(norm.seconds.backward, 1e-9) and loss.seconds.backward > 0


@pytest.mark.parametrize("family", ["amoebanet", "transformer"])
def test_the_models_are_timed_and_stay_without_memory(family: str) -> None:
    with torch.device("meta"):
        layers = amoebanet_d(3, 8, 10) if family == "amoebanet" else transformer_lm(5, **SMALL)
    if family == "amoebanet":
        gpipe.convert_batch_norm(layers)
        example = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    else:
        example = torch.randint(16, (2, 6)), torch.randint(16, (2, 6))
    state = torch.get_rng_state()
    found = LayerTimer(CPU, 1, sgd).time(layers, loss_and_metrics, example)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(found) == len(layers) + 1 and all(parameter.is_meta for parameter in layers.parameters())
    assert all(value > 0 for timing in found[:-1] for value in (*timing.seconds[:3], timing.update))
    assert found[-1].update == 0, "the loss has no parameters"


class Noting(nn.BatchNorm1d):
    """Notes which of its runs are repetitions."""

    notes: ClassVar[list[bool]] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        Noting.notes.append(gpipe.is_recomputing())
        return super().forward(input)


def test_a_forward_is_timed_with_the_statistics_that_a_recomputation_does_without() -> None:
    layers = gpipe.convert_batch_norm(nn.Sequential(nn.Linear(4, 4), Noting(4)))
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    Noting.notes.clear()
    LayerTimer(CPU, 2).time(layers, F.mse_loss, (torch.randn(5, 4), torch.randn(5, 4)))
    assert Noting.notes == [False, True] * 3, "a forward and a recomputation in each of three rounds"
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())


SMALL = {"vocabulary_size": 16, "model_size": 8, "feedforward_size": 16, "num_heads": 2}


def loss_and_metrics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_are_timed_compiled_where_a_run_compiles_them() -> None:
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled.append(str(graph.code))
        return graph.forward

    layers, example = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(5, 4), torch.randn(5, 4))
    eager = LayerTimer(CPU, 1).time(layers, F.mse_loss, example)
    found = LayerTimer(CPU, 1, compile_options={"backend": backend}).time(layers, F.mse_loss, example)
    assert len(found) == len(eager) == 3
    assert {name for name in ("linear", "tanh", "mse") if any(name in code for code in compiled)} == {"linear", "tanh"}


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^repeats is 0, expected 1 or more: time every layer at least once\.$"):
        LayerTimer(CPU, 0, sgd)
