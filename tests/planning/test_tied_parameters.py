"""A plan counts a tied parameter in each stage that has a copy, and once where it speaks of the model."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn

import gpipe
from gpipe.planning.step import Setting, forecast
from gpipe.planning.plan import measure_seconds, plan_pipeline, print_plan
from gpipe.planning.profile import profile_layers
from gpipe.planning.speed import Speed
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
        assert one.first_backward_peak_bytes == other.first_backward_peak_bytes


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
    layers = tied_layers("meta")
    plan = plan_pipeline(gpipe.analyze_layers(layers, mini_batch(0)[0]), [3, 3, 1], 2, partition_by="parameter_bytes")
    assert plan.parameters == MODEL_PARAMETERS
    assert sum(stage.parameters for stage in plan.stages) == MODEL_PARAMETERS + 3 * 54 + 36
    console = Console(file=io.StringIO(), highlight=False)
    print_plan(plan, "tied", ["0", "1"], console)
    assert f"\n{MODEL_PARAMETERS:,} parameters. " in console.file.getvalue()

    profiles, speed = profile_layers(layers, loss, mini_batch(0)), Speed(1e3, 1e3, 1e3, 1e3)
    found = forecast(profiles, speed.seconds(profiles), [3, 3], Setting(2, 3), speed)
    assert found.parameters == MODEL_PARAMETERS


def test_tied_layers_can_be_timed() -> None:
    inputs = mini_batch(0)[0].to("meta")
    seconds = measure_seconds(tied_layers("meta"), inputs, 0, "cpu")
    assert len(seconds) == 6
