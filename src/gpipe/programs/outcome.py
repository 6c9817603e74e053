"""What a run leaves behind beside its log and its checkpoints, and its last words."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gpipe.durable_files import replacing
from gpipe.launch.processes import Place
from gpipe.pipeline.schedule import SCHEDULES, Rematerialize
from gpipe.pipeline.timeline import Timeline, plot, simulate
from gpipe.planning.report import describe_bubble
from gpipe.planning.step import Plan
from gpipe.records import RECORD_FILE, make_record, write_record
from gpipe.training.summary import Summary
from gpipe.training.tracking import OUTCOME, Tracker

TRACE_FILE = "timeline.json"
PICTURE_FILE = "timeline.png"


def finish(
    folder: Path,
    config: Mapping[str, Any],
    plan: Plan,
    summary: Summary,
    timeline: Timeline | None,
    place: Place,
    overrides: Sequence[str],
    tracker: Tracker,
    *,
    hints: bool,
) -> None:
    """Write the run's record and timeline, and print what it did, where its files are, and what to try next.

    config: the whole run's, as JSON. timeline: the last step that was recorded. overrides: those of the command line.
    hints: whether to say what to try next.
    """
    bubbles = "" if timeline is None else _write_timeline(folder, config["pipeline"], plan, timeline)
    num_gpus = torch.cuda.device_count() if place.device_type == "cuda" else 0
    record = make_record(
        kind="measured",
        command=_command(overrides),
        experiment=config["name"],
        config=config,
        seed=config["seed"],
        results={
            **summary.as_dict(),
            "simulated_bubble": plan.bubble,
            "predicted_bubble": plan.equal_stages_bubble,  # by the formula
            "partitions": plan.partitions,
            "parameters": plan.parameters,
            "evaluated_parameters": plan.evaluated_parameters,
        },
        gpus=[torch.cuda.get_device_name(index) for index in range(num_gpus)],
        num_cores=place.num_cores,
    )
    write_record(folder / RECORD_FILE, record)
    if timeline is not None:
        tracker.log_picture(summary.num_steps, "timeline", folder / PICTURE_FILE)
    tracker.log_table(summary.num_steps, OUTCOME, _rows(summary.as_dict()))
    more = f"\n{_hints(folder, config, overrides)}" if hints else ""
    print(f"\n{_outcome(config['name'], summary)}{bubbles}{more}", flush=True)


def _write_timeline(folder: Path, pipeline: Mapping[str, Any], plan: Plan, measured: Timeline) -> str:
    """Write a step as a trace for Perfetto and, above its simulation, as a picture; return a line on its bubble.

    The simulation gives every task its measured mean time, and each device of the schedule one of its own, with links
    that cost nothing.
    """
    num_microbatches = 1 + max(event.task.micro_batch for event in measured.events)
    shape = pipeline["num_stages"], num_microbatches, Rematerialize(pipeline["rematerialize"])
    schedule = SCHEDULES[pipeline["schedule"]](*shape, pipeline["stages_per_device"])
    simulated = simulate(schedule, measured.mean_seconds())
    with replacing(folder / TRACE_FILE) as trace, replacing(folder / PICTURE_FILE) as picture:
        measured.write_trace(trace)
        plot({"measured": measured, "simulated": simulated}, picture)
    if plan.bubble is None:
        return ""
    return (
        f"\nPlanned {describe_bubble(plan)}; {simulated.bubble:.1%} simulated from the tasks' measured seconds, "
        f"{measured.bubble:.1%} measured ({PICTURE_FILE}; {TRACE_FILE} opens in ui.perfetto.dev)."
    )


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the outcome as a table of figures, those of each evaluation set among them."""
    figures = {key: value for key, value in results.items() if key not in ("evaluation", "least_loss")}
    for name, metrics in results["evaluation"].items():
        figures |= {f"{name}/{metric}": value for metric, value in metrics.items()}
    return [{"figure": figure, "value": value} for figure, value in figures.items()]


def _outcome(name: str, summary: Summary) -> str:
    """Return a run's last words; a wait for data worth mentioning is mentioned, with its remedy."""
    minutes, seconds = divmod(round(summary.seconds), 60)
    took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    waited = summary.wait_seconds / max(summary.seconds, 1e-9)
    took += f", {waited:.1%} of them waiting for data" + (" (raise data.num_workers)" if waited > 0.1 else "")
    figures = (("top-1", summary.top1), ("top-5", summary.top5))
    accuracy = ", ".join(f"{figure} {value:.1%}" for figure, value in figures if value is not None)
    name_of_set, metrics = next(iter(summary.evaluation.items()), ("", {}))
    accuracy += f", loss {metrics['loss']:.3f}" if metrics else ""
    result = f"{accuracy} on the {name_of_set} {summary.examples}" if accuracy else "not evaluated"
    replaced = f" {summary.num_replaced} broken {summary.examples} were replaced." if summary.num_replaced else ""
    return f"{name}: {result} after {summary.num_steps} steps in {took}.{replaced}"


def _hints(folder: Path, config: Mapping[str, Any], overrides: Sequence[str]) -> str:
    length = "max_steps" if config["trainer"]["max_steps"] else "num_epochs"
    more = f"trainer.{length}={2 * config['trainer'][length]}"
    train_on = f"  train on          {_command(overrides, more, f'trainer.resume_from={folder}')}\n"
    alone = ["pipeline.num_stages=1", "launch.num_processes=1"]
    if config["launch"]["num_replicas"] > 1:
        alone.append("launch.num_replicas=1")
    if config["pipeline"]["stages_per_device"] > 1:  # 1F1B has the same gradients, to the last bit
        alone += ["pipeline.schedule=1f1b", "pipeline.stages_per_device=1"]
    plain = _command(overrides, *alone)
    experiment = "amoebanet_imagenet" if config["model"]["family"] == "amoebanet" else "transformer_multilingual"
    translate = ""
    if config["model"]["family"] == "translation_transformer" and config["trainer"]["checkpoints"]["keep"]:
        command = shlex.join(["python", "translate.py", f"checkpoint={folder}", "text=Danke"])
        translate = f"  translate         {command}\n"
    return (
        f"Files in {folder}: {', '.join(sorted(path.name for path in folder.glob('[!.]*')))}\n"
        "Try next:\n"
        f"{train_on if config['trainer']['checkpoints']['keep'] else ''}"
        f"{translate}"
        f"  without pipeline  {plain}\n"
        f"  the paper's plan  python train.py +experiment={experiment} trainer.dry_run=true"
    )


def _command(overrides: Sequence[str], *changes: str) -> str:
    """Return the command line of a run with these overrides and changes, which replace overrides of the same keys."""
    changed = {change.partition("=")[0] for change in changes}
    kept = [item for item in overrides if item.lstrip("+").partition("=")[0] not in changed]
    return shlex.join(["python", "train.py", *kept, *changes])
