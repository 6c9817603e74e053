"""A plan counts a tied parameter in each stage that has a copy, and once where it speaks of the model."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn

import gpipe
from gpipe.planning.accelerator import Speed, find_accelerator
from gpipe.planning.planner import Planner
from gpipe.planning.profile import profile_layers
from gpipe.planning.report import print_plan
from gpipe.planning.step import Setting
from gpipe.planning.timing import LayerTimer
from tests.support.tied_model import SIZE, loss, mini_batch, tied_layers

MODEL_PARAMETERS = sum(parameter.numel() for parameter in tied_layers().parameters())


def test_a_profile_is_that_of_layers_with_copies() -> None:
    layers, untied = tied_layers("meta"), tied_layers("meta")
    untied[4][1].weight = nn.Parameter(torch.empty_like(untied[4][1].weight))
    for index, name in ((2, "table"), (3, "table"), (5, "weight")):
        setattr(untied[index], name, nn.Parameter(torch.empty_like(getattr(untied[index], name))))
    found, expected = (profile_layers(model, loss, mini_batch(0)) for model in (layers, untied))
    assert [profile.tied_parameters for profile in found] == [0, 0, 54, 54, 36, 54, 0]
    assert {profile.tied_parameters for profile in expected} == {0}
    for one, other in zip(found, expected, strict=True):
        assert (one.parameter_bytes, one.trainable_bytes) == (other.parameter_bytes, other.trainable_bytes)
        assert one.peaks.first_backward == other.peaks.first_backward


def test_a_run_of_equal_layers_that_share_a_parameter() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(6)))
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    inputs = torch.zeros(4, SIZE)
    profiles = profile_layers(layers, nn.MSELoss(), (inputs, inputs))
    assert [profile.parameters for profile in profiles] == [42] * 6 + [0]
    assert [profile.tied_parameters for profile in profiles] == [0] + [36] * 5 + [0]


def test_the_model_is_counted_once() -> None:
    profiles = profile_layers(tied_layers("meta"), loss, mini_batch(0))
    accelerator = find_accelerator("cpu")
    planner = Planner(lambda _: profiles, lambda *_: [3, 3], 7, accelerator, Speed.of(accelerator, "float32"))
    console = Console(file=io.StringIO(), highlight=False)
    plan = planner.plan(Setting(2, 3))
    print_plan(planner, plan, "tied", console)
    assert plan.parameters == MODEL_PARAMETERS
    assert sum(stage.parameters for stage in plan.stages) == MODEL_PARAMETERS + 3 * 54 + 36
    more = f"the rows have {3 * 54 + 36} more: each layer has its own copy of a tied one"
    assert f"\n{MODEL_PARAMETERS:,} parameters ({more}). " in console.file.getvalue().replace("\n(", " (")
    costs = gpipe.analyze_layers(tied_layers("meta"), mini_batch(0)[0])
    assert sum(cost.parameters - cost.tied_parameters for cost in costs) == MODEL_PARAMETERS


def test_tied_layers_can_be_timed() -> None:
    timings = LayerTimer(torch.device("cpu"), 1).time(tied_layers("meta"), loss, mini_batch(0))
    assert len(timings) == 7
