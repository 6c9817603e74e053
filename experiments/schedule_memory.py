"""Plan the memory and the time of each schedule.

    python -m experiments.schedule_memory

Transformer-48 of the paper's Table 2 on eight devices of 16 GB with 32 micro-batches of one sequence: all
schedules, with and without re-materialisation. The numbers are planned. Seconds.
"""

from itertools import product
from typing import Any

from experiments.program import StudyProgram, track
from experiments.table1_capacity.columns import Column
from experiments.table1_capacity.plans import cut_by_variance, make_planner
from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.planner import Planner
from gpipe.planning.step import Setting
from reproductions.bubble.schedules import SCHEDULE_MEMORY

NUM_LAYERS, NUM_DEVICES, NUM_MICROBATCHES = 48, 8, 32
# With the stages of each device.
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("split_gpipe", 1), ("zb_h1", 1), ("zb_v", 2))


def plan(planner: Planner, schedule: str, stages_per_device: int, mode: Rematerialize) -> dict[str, Any]:
    """Return a row of the table."""
    setting = Setting(NUM_DEVICES * stages_per_device, NUM_MICROBATCHES, mode, schedule, stages_per_device)
    found = planner.plan(setting)
    return {
        "schedule": schedule,
        "rematerialize": str(mode),
        "stages_per_device": stages_per_device,
        "bubble": found.timeline.bubble,
        "step_seconds": found.step_seconds,
        "activation_bytes": [memory.activation_bytes for memory in found.memory],
        "peak_bytes": [memory.peak_bytes for memory in found.memory],
    }


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"bubble": SCHEDULE_MEMORY.tables})
    program.parse()
    planner = make_planner(Column("Transformer-48", NUM_LAYERS, None, NUM_DEVICES), cut_by_variance)
    modes = (Rematerialize.ALWAYS, Rematerialize.NEVER)
    settings = list(product(modes, SCHEDULES))
    rows = [plan(planner, *schedule, mode) for mode, schedule in track(settings, "schedules")]
    config = {
        "num_layers": NUM_LAYERS,
        "num_devices": NUM_DEVICES,
        "num_microbatches": NUM_MICROBATCHES,
        "device": planner.accelerator.name,
    }
    program.publish_record(SCHEDULE_MEMORY.make_record(config, {"rows": rows}, kind="planned"))
