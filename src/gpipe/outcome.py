"""What a run leaves behind beside its log and its checkpoints, and its last words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpipe.launch.processes import Place
from gpipe.pipeline.schedule import SCHEDULES, Rematerialize
from gpipe.pipeline.timeline import Timeline, plot, simulate
from gpipe.planning.plan import Plan
from gpipe.results.records import RECORD_FILE, make_record, write_record
from gpipe.training.summary import Summary

TRACE_FILE = "timeline.json"
PICTURE_FILE = "timeline.png"


def finish(
    folder: Path,
    config: Mapping[str, Any],
    plan: Plan,
    summary: Summary,
    timeline: Timeline | None,
    place: Place,
    command: str,
) -> None:
    """Write the run's record and timeline, and print what it did, where its files are, and what to try next.

    config: the whole run's, as JSON. timeline: the last step that was recorded. command: what started the run.
    """
    bubbles = "" if timeline is None else _write_timeline(folder, config["pipeline"], plan, timeline, place)
    num_gpus = torch.cuda.device_count() if place.device_type == "cuda" else 0
    record = make_record(
        kind="measured",
        command=command,
        experiment=config["name"],
        config=config,
        seed=config["seed"],
        results=summary.as_dict(),
        gpus=[torch.cuda.get_device_name(index) for index in range(num_gpus)],
    )
    write_record(folder / RECORD_FILE, record)
    print(f"\n{_outcome(config['name'], summary)}{bubbles}\n{_hints(folder, config, command)}", flush=True)


def _write_timeline(folder: Path, pipeline: Mapping[str, Any], plan: Plan, measured: Timeline, place: Place) -> str:
    """Write a step as a trace for Perfetto and, above its simulation, as a picture; return a line on its bubble.

    The simulation gives every task its measured mean time, and each stage a device of its own, linked at no cost.
    """
    num_microbatches = 1 + max(event.task.micro_batch for event in measured.events)
    rematerialize = Rematerialize(pipeline["rematerialize"])
    schedule = SCHEDULES[pipeline["schedule"]](measured.num_stages, num_microbatches, rematerialize)
    simulated = simulate(schedule, measured.mean_seconds())
    measured.write_trace(folder / TRACE_FILE)
    plot({"measured": measured, "simulated": simulated}, folder / PICTURE_FILE)
    if place.mesh is None:  # its stages take turns: there is no bubble to speak of
        return ""
    return (
        f"\nBubble of a step: {plan.bubble:.1%} predicted, {simulated.bubble:.1%} simulated, "
        f"{measured.bubble:.1%} measured ({PICTURE_FILE}; {TRACE_FILE} opens in ui.perfetto.dev)."
    )


def _outcome(name: str, summary: Summary) -> str:
    minutes, seconds = divmod(round(summary.seconds), 60)
    took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    figures = (("top-1", summary.top1), ("top-5", summary.top5))
    accuracy = ", ".join(f"{figure} {value:.1%}" for figure, value in figures if value is not None)
    return f"{name}: {accuracy} on the test images after {summary.num_steps} steps in {took}."


def _hints(folder: Path, config: Mapping[str, Any], command: str) -> str:
    num_epochs = 2 * config["trainer"]["num_epochs"]
    return (
        f"Files in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}\n"
        "Try next:\n"
        f"  train on                    {command} trainer.num_epochs={num_epochs} trainer.resume_from={folder}\n"
        f"  the same without a pipeline {command} pipeline=none launch=one_process\n"
        "  the plan of the paper's     python train.py +experiment=amoebanet_imagenet trainer.dry_run=true"
    )
