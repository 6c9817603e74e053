"""What the settings leave to the device: its precision and its memory format."""

import pytest

from gpipe.config import Autocast
from gpipe.planning.accelerator import ACCELERATORS
from gpipe.programs.layout import build_planner
from gpipe.programs.precision import precision_of, settle_precision
from tests.config.composition import run_of

pytestmark = pytest.mark.usefixtures("composer")
IMAGES = ("+experiment=image_classification", "model.name=resnet18", "data.num_classes=10", "data.image_size=64")


@pytest.mark.parametrize(
    ("device", "autocast", "channels_last"),
    [("h100", Autocast.bfloat16, True), ("p100", Autocast.none, True), ("cpu", Autocast.none, False)],
)
def test_a_recipe_for_gpus_has_their_precision_and_format_and_no_others(
    device: str, autocast: Autocast, channels_last: bool
) -> None:
    trainer = settle_precision(run_of(*IMAGES, "trainer.evaluation.autocast=auto"), ACCELERATORS[device]).trainer
    assert (trainer.autocast, trainer.evaluation.autocast, trainer.channels_last) == (autocast, autocast, channels_last)


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_what_is_said_counts_on_every_device(device: str) -> None:
    for said in (Autocast.none, Autocast.bfloat16):
        run = run_of(*IMAGES, f"trainer.autocast={said.value}", "trainer.channels_last=false")
        trainer = settle_precision(run, ACCELERATORS[device]).trainer
        assert (trainer.autocast, trainer.channels_last) == (said, False)
        assert (precision_of(settle_precision(run, ACCELERATORS[device])) == "float32") is (said is Autocast.none)


def test_a_plan_for_a_device_has_its_precision() -> None:
    run = run_of("trainer.autocast=auto", "pipeline.num_stages=2")
    for device in ("h100", "cpu"):
        accelerator = ACCELERATORS[device]
        peak = build_planner(run, accelerator).speed.peak_flops_per_second
        assert peak == max(accelerator.bfloat16_flops, accelerator.float32_flops)
