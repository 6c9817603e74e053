"""Compare planned memory with the allocator's, device by device, for small models of ours and of others on the CPU.

    python -m experiments.planned_memory

One process plays all stages of a real step. stage_accounting.py reads the peak of each device from torch's allocator,
for every mode of re-materialisation and every schedule, on 1, 2 and 4 devices, or 1 and 2 if each has two stages. The
models of others run with GPipe's schedule, with and without re-materialisation. With `fit` the limit is halfway between
a step that recomputes everything and one that recomputes nothing. Five minutes on two cores.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import torch

import gpipe
from experiments.planned_memory.small_models import MICROBATCH_SIZE, SmallModel, make_image_model, make_text_model
from experiments.planned_memory.stage_accounting import ProcessorAllocator, measure_peaks
from experiments.planned_memory.strangers import make_strangers
from experiments.program import StudyProgram, track
from gpipe.pipeline.schedule import Rematerialize
from gpipe.pipeline.schedules.choice import SCHEDULES, place_stages
from gpipe.planning.cut import partition_by_memory
from gpipe.planning.fit import Fit
from gpipe.planning.step import Setting, plan_memory, settle
from reproductions.table1_model_size.planned_memory import PLANNED_MEMORY

CLAIM = "table1_model_size"
NUM_MICROBATCHES = 4
FIT = Fit(0)  # its limit depends on the model
SETTINGS = [
    Setting(num_stages, NUM_MICROBATCHES, mode, schedule, per_device)
    for schedule, mode, num_stages in product(SCHEDULES, (*Rematerialize, FIT), (1, 2, 4))
    if num_stages % (per_device := 2 if schedule in ("interleaved_1f1b", "zb_v") else 1) == 0
]


def compare(model: SmallModel, setting: Setting) -> dict[str, Any]:
    """Return the planned and the measured peak of each device in bytes, with a cut by memory.

    Where a device has two stages, which share its memory, the layers are cut into equal numbers instead.

    Planned with each operation measured by itself, and from the description of the layers alone.
    """
    mode = "two kept" if isinstance(setting.rematerialize, tuple) else "fit"
    if isinstance(setting.rematerialize, Rematerialize):
        mode = setting.rematerialize
    if setting.stages_per_device == 1:
        cut = partition_by_memory(model.profiles, setting.leanest)
    else:
        cut = gpipe.partition_layers([1.0] * len(model.layers), setting.num_stages)
    if isinstance(setting.rematerialize, Fit):
        setting = settle(model.profiles, cut, replace(setting, rematerialize=Fit(_find_middle(model, cut, setting))))
    planned, described = (plan_memory(profiles, cut, setting) for profiles in (model.profiles, model.described))
    return {
        "model": model.title,
        "schedule": setting.schedule,
        "rematerialize": mode,
        "num_stages": setting.num_stages,
        "stages_per_device": setting.stages_per_device,
        "partitions": cut,
        "planned_bytes": [memory.peak_bytes for memory in planned],
        "described_bytes": [memory.peak_bytes for memory in described],
        "measured_bytes": _measure(model, cut, setting),
    }


def _find_middle(model: SmallModel, cut: list[int], setting: Setting) -> int:
    """Return the memory half way between what the fullest device needs without and with all activations."""
    ends = (replace(setting, rematerialize=mode) for mode in (Rematerialize.ALWAYS, Rematerialize.NEVER))
    return sum(max(memory.peak_bytes for memory in plan_memory(model.profiles, cut, end)) for end in ends) // 2


def _measure(model: SmallModel, partitions: list[int], setting: Setting) -> list[int]:
    assert not isinstance(setting.rematerialize, Fit)
    pipeline = gpipe.Pipeline(
        model.layers,
        model.loss,
        partitions,
        setting.num_microbatches,
        rematerialize=setting.rematerialize,
        schedule=setting.schedule,
        stages_per_device=setting.stages_per_device,
    )
    placement = place_stages(setting.schedule, setting.num_stages, setting.stages_per_device)
    batch = model.batch(MICROBATCH_SIZE * setting.num_microbatches)
    return measure_peaks(pipeline, batch, ProcessorAllocator(), placement, model.autocast)


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: PLANNED_MEMORY.tables})
    program.parse()
    torch.set_num_threads(1)
    pairs = list(product((make_image_model(), make_text_model()), SETTINGS))
    rows = [compare(model, setting) for model, setting in track(pairs, "settings")]
    few = [one for one in SETTINGS if one.schedule == "gpipe" and one.rematerialize in ("always", "never")]
    pairs = list(product(make_strangers(), few))
    strangers = [compare(model, setting) for model, setting in track(pairs, "settings of strangers")]
    config = {"num_microbatches": NUM_MICROBATCHES, "microbatch_size": MICROBATCH_SIZE}
    program.publish_record(PLANNED_MEMORY.make_record(config, {"rows": rows, "strangers": strangers}))
