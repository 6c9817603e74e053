"""Plan the FLOPs and the duration of the runs of the paper's Table 4.

    python -m experiments.table4_cost

Composes each experiment at the paper's scale, counts the FLOPs of an image's forward pass on the meta device, and
multiplies: forward, recomputation, and a backward of twice the forward. Seconds, no data, no GPU.
"""

from typing import Any

from hydra import compose, initialize_config_dir

from experiments.program import StudyProgram, track
from gpipe.config import register_schemas, to_run
from gpipe.programs.layout import accelerator_at_hand, build_planner, build_setting
from reproductions import ROOT
from reproductions.pages import read_paper
from reproductions.table4_imagenet_and_transfer.tables import COST

FOLDER = ROOT / "reproductions" / "table4_imagenet_and_transfer"
SUSTAINED_FLOPS = 100e12  # per second and accelerator: an A100 or TPUv4 may reach it on these convolutions in bfloat16
SLOTS = {"rmsprop": 2, "sgd": 1}  # tensors of a parameter's size that the optimiser keeps
PASSES = 4  # forward, recomputation, and a backward of twice the forward


def plan_cost(data: str, train_images: int) -> dict[str, Any]:
    """Return a row of the table: what one run on a data set computes."""
    experiment = ["+experiment=amoebanet_imagenet"] if data == "imagenet" else ["+experiment=transfer", f"data={data}"]
    start = [] if data == "imagenet" else ["init_from=null"]
    # Cut by FLOPs: this cut does not depend on the accelerator of this machine.
    run = to_run(compose("train", overrides=[*experiment, *start, "pipeline.partition_by=flops"]))
    accelerator = accelerator_at_hand(run)
    plan = build_planner(run, accelerator).plan(build_setting(run, accelerator))
    forward_flops = sum(stage.forward_flops for stage in plan.stages) / plan.microbatch_size
    settings = run.trainer
    steps = min(settings.num_epochs * (train_images // settings.batch_size), settings.max_steps or 10**12)
    copies = 2 + SLOTS[run.optimizer.name] + (run.ema.decay is not None)  # weights, gradients, slots, averages
    total = forward_flops * PASSES * settings.batch_size * steps
    return {
        "data": data,
        "train_images": train_images,
        "batch_size": settings.batch_size,
        "steps": steps,
        "forward_flops": forward_flops,
        "total_flops": total,
        "accelerator_days": total / SUSTAINED_FLOPS / 86400,
        "num_stages": len(plan.stages),
        "state_bytes": max(4 * stage.parameters for stage in plan.stages) * copies,
    }


if __name__ == "__main__":
    program = StudyProgram(__doc__, {FOLDER.name: COST.tables})
    program.parse()
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        rows = [plan_cost(row["data"], int(row["train"])) for row in track(read_paper(FOLDER), "data sets")]
    config = {"sustained_flops": SUSTAINED_FLOPS, "passes": PASSES}
    program.publish_record(COST.make_record(config, {"rows": rows}, kind="planned"))
