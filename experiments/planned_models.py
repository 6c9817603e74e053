"""Plan the training of ten well-known timm models on 1, 2, 4 and 8 H100.

    python -m experiments.planned_models

Images of the models' own sizes, 256 in a mini-batch of 32 micro-batches, bfloat16, everything re-materialised, AdamW
with averaged weights. Only the plan is computed. Two minutes.
"""

from typing import Any

from hydra import compose, initialize_config_dir

from experiments.program import StudyProgram, track
from gpipe.config import register_schemas, to_run
from gpipe.planning.accelerator import find_accelerator
from gpipe.programs.complete import complete
from gpipe.programs.layout import build_planner, build_setting
from reproductions import ROOT
from reproductions.task_independence.tables import PLANNED_MODELS, PLANNED_STAGES

CLAIM, DEVICE, NUM_CLASSES = "task_independence", "h100", 1000
MODELS = (
    "resnet50",
    "resnet152",
    "densenet201",
    "efficientnet_b7",
    "regnety_160",
    "convnext_large",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "swin_base_patch4_window7_224",
    "mixer_l16_224",
)
SETTINGS = (
    "pipeline.num_microbatches=32",
    "trainer.batch_size=256",
    "trainer.autocast=bfloat16",
    f"data.num_classes={NUM_CLASSES}",
)


def plan_model(name: str) -> dict[str, Any]:
    """Return the plans of one model, by K."""
    row: dict[str, Any] = {"model": name, "plans": {}}
    for num_stages in PLANNED_STAGES:
        words = ["+experiment=image_classification", f"model.name={name}", f"pipeline.num_stages={num_stages}"]
        run = complete(to_run(compose("train", overrides=[*words, *SETTINGS])))
        planner = build_planner(run, find_accelerator(DEVICE))
        plan = planner.plan(build_setting(run, planner.accelerator))
        row |= {"parameters": plan.parameters, "image_size": getattr(run.data, "image_size", None)}
        row["plans"][str(num_stages)] = {
            "images_per_second": run.trainer.batch_size / plan.step_seconds,
            "peak_bytes": plan.peak_bytes,
            "bubble": plan.bubble,
        }
    return row


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: PLANNED_MODELS.tables})
    program.parse()
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        rows = [plan_model(name) for name in track(MODELS, "models")]
    config = {"device": DEVICE, "settings": list(SETTINGS)}
    program.publish_record(PLANNED_MODELS.make_record(config, {"models": rows}, kind="planned"))
