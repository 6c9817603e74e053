"""Planned memory, with operations measured, beside what a real step allocates, stage by stage."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from experiments.planned_memory.__main__ import NUM_MICROBATCHES, compare
from experiments.planned_memory.small_models import SmallModel, make_image_model, make_text_model
from experiments.planned_memory.strangers import make_strangers
from gpipe.pipeline.layers import split_backward
from gpipe.pipeline.schedule import Rematerialization, Rematerialize
from gpipe.planning.step import Setting

TOLERANCE = 0.1


@pytest.fixture(scope="module", params=[make_image_model, make_text_model], ids=["amoebanet", "transformer"])
def model(request: pytest.FixtureRequest) -> SmallModel:
    make: Callable[[], SmallModel] = request.param
    return make()


# What the stages keep differs most between these; experiments/planned_memory goes through all.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "num_stages", "mode"),
    [
        ("gpipe", 1, Rematerialize.NEVER),
        ("gpipe", 2, Rematerialize.EXCEPT_LAST),
        ("gpipe", 4, Rematerialize.ALWAYS),
        ("gpipe", 2, (3, 1)),
        ("1f1b", 2, (1, 1)),
        ("zb_h1", 2, (1, 1)),
        ("1f1b", 4, Rematerialize.NEVER),
        ("split_gpipe", 4, Rematerialize.ALWAYS),
        ("zb_h1", 4, Rematerialize.NEVER),
    ],
)
def test_a_stages_planned_peak_is_within_a_tenth_of_the_allocators(
    model: SmallModel, schedule: str, num_stages: int, mode: Rematerialization
) -> None:
    found = compare(model, Setting(num_stages, NUM_MICROBATCHES, mode, schedule))
    assert len(found["planned_bytes"]) == num_stages
    assert found["planned_bytes"] == pytest.approx(found["measured_bytes"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Rematerialize.ALWAYS, Rematerialize.NEVER])
def test_gradients_of_products_too_small_to_wait_are_planned_from_the_first_backward(
    model: SmallModel, mode: Rematerialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_backward, "SMALL_PRODUCT", 2**23)
    found = compare(replace(model), Setting(4, NUM_MICROBATCHES, mode, "zb_h1"))
    assert found["planned_bytes"] == pytest.approx(found["measured_bytes"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Rematerialize.ALWAYS, Rematerialize.NEVER])
def test_copies_of_weights_that_autocast_makes_are_planned_once_per_step(
    model: SmallModel, mode: Rematerialize
) -> None:
    mixed = replace(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    found = compare(mixed, Setting(2, NUM_MICROBATCHES, mode))
    assert found["planned_bytes"] == pytest.approx(found["measured_bytes"], rel=TOLERANCE)


@pytest.fixture(scope="module")
def strangers() -> dict[str, SmallModel]:
    return {model.title: model for model in make_strangers()}


# Those whose operations take most inside of themselves, and one with gradients that skip stages.
@pytest.mark.slow
@pytest.mark.parametrize("mode", [Rematerialize.ALWAYS, Rematerialize.NEVER])
@pytest.mark.parametrize("title", ["LSTM, 4 layers", "ConvNeXt", "ResNet-18", "U-Net", "Llama of transformers"])
def test_a_strangers_planned_peak_is_within_a_tenth_of_the_allocators(
    strangers: dict[str, SmallModel], title: str, mode: Rematerialize
) -> None:
    found = compare(strangers[title], Setting(4, NUM_MICROBATCHES, mode))
    assert found["planned_bytes"] == pytest.approx(found["measured_bytes"], rel=TOLERANCE)
