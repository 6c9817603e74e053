"""The planned memory of an evaluation, against arithmetic and against one on real tensors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe.models import transformer_lm
from gpipe.pipeline.engine import Pipeline
from gpipe.planning.evaluation import EvaluationPlanner
from gpipe.planning.ledger import Ledger
from gpipe.planning.profile import profile_layers
from gpipe.planning.step import Setting
from gpipe.training.evaluation import EvaluationMetrics
from tests.planning.small_profiles import LOSS, layer, with_quiet_peak


def plan(planner: EvaluationPlanner, partitions: list[int], setting: Setting) -> tuple[int, ...]:
    return planner.describe(setting).plan(partitions, setting)


def test_a_device_has_its_state_its_inputs_and_the_largest_forward() -> None:
    profiles = [with_quiet_peak(layer(4000), peak) for peak in (50, 70, 30)]
    sizes = []

    def profile(size: int) -> list:
        sizes.append(size)
        return [*profiles, with_quiet_peak(LOSS, 900)]

    planner = EvaluationPlanner(profile, batch_size=10)
    found = plan(planner, [2, 1], Setting(2, 4, state_ratio=2.0))
    # The first stage has the inputs of four micro-batches; its second layer's come on top of its forward. The metrics
    # have the logits beside them.
    assert found == (3 * 8000 + 4 * 10 + 10 + 70, 3 * 4000 + 10 + 10 + 900)
    assert plan(planner, [3], Setting(1, 3, state_ratio=0.0)) == (12000 + 3 * 10 + 10 + 900,)
    assert sizes == [3, 4]


def test_devices_with_several_stages_hold_all_of_them() -> None:
    planner = EvaluationPlanner(lambda _: [*([layer(1000)] * 4), LOSS], batch_size=4)
    setting = Setting(4, 4, schedule="interleaved_1f1b", stages_per_device=2, state_ratio=0.0)
    assert plan(planner, [1] * 4, setting) == (2000 + 4 * 10 + 10 + 10, 2000 + 10 + 10)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_plan_is_what_an_evaluation_allocates(dropout: float) -> None:
    with torch.device("meta"):
        layers = transformer_lm(
            2, vocabulary_size=3000, model_size=32, feedforward_size=64, num_heads=4, dropout=dropout
        )
    pipeline = Pipeline(layers, F.cross_entropy, [len(layers)], 3)
    inputs, targets = (torch.randint(3000, (12, 20)) for _ in range(2))
    measure = EvaluationMetrics().measure
    with Ledger(pipeline.parameters()) as ledger:
        ledger.hold([inputs, targets])
        pipeline.measure(inputs, targets, measure)
    profiles = profile_layers(layers, measure, (inputs[:4], targets[:4]), training=False)
    planner = EvaluationPlanner(lambda _: profiles, batch_size=12)
    (planned,) = plan(planner, [len(layers)], Setting(1, 3, state_ratio=0.0))
    parameters = sum(parameter.nbytes for parameter in pipeline.parameters())
    assert planned - parameters == pytest.approx(ledger.peak_bytes - targets.nbytes, rel=0.01)


def test_layers_are_described_in_evaluation_mode() -> None:
    layers = nn.Sequential(nn.Linear(10, 1000), nn.Dropout(0.5))
    example = torch.zeros(100, 10), torch.zeros(100)
    peaks = [
        profile_layers(layers, lambda outputs, _: outputs.sum(), example, training=training)[1].peaks.quiet
        for training in (True, False)
    ]
    assert peaks[0] >= 400_000 and peaks[1] == 0
