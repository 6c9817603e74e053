"""Write the record and the timeline of a finished run, and print its outcome."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpipe.config import (
    AmoebaNetConfig,
    RunConfig,
    TimmConfig,
    TransformerLMConfig,
    TransformersConfig,
    TranslationModelConfig,
    to_plain,
)
from gpipe.config.literally import make_word
from gpipe.durable_files import replacing
from gpipe.launch.processes import Place
from gpipe.pipeline.timeline import Timeline
from gpipe.planning.picture import plot
from gpipe.planning.report import describe_bubble
from gpipe.planning.simulation import simulate
from gpipe.planning.step import Plan
from gpipe.records import RECORD_FILE, make_record, write_record
from gpipe.training.summary import Summary
from gpipe.training.tracking import LOST, Tracker

TRACE_FILE = "timeline.json"
PICTURE_FILE = "timeline.png"
_PAPERS = {  # the experiment of the paper with a model of the same family
    AmoebaNetConfig: "amoebanet_imagenet",
    TransformerLMConfig: "table2_transformer_lm",
    TranslationModelConfig: "transformer_multilingual",
}


def record_outcome(
    folder: Path,
    run: RunConfig,
    plan: Plan,
    summary: Summary,
    timeline: Timeline | None,
    place: Place,
    overrides: Sequence[str],
    tracker: Tracker,
    *,
    hints: bool,
) -> None:
    """Write the run's record and timeline; print what it did, where its files are and, with `hints`, what to try next.

    `timeline` is the last recorded step; `overrides` are the words of the command line that choose the settings.
    """
    bubbles, has_picture = ("", False) if timeline is None else _write_timeline(folder, plan, timeline)
    num_gpus = torch.cuda.device_count() if place.device_type == "cuda" else 0
    record = make_record(
        kind="measured",
        command=_command(overrides),
        experiment=run.name,
        config=to_plain(run),
        seed=run.seed,
        results={
            **summary.as_dict(),
            "simulated_bubble": plan.bubble,
            "equal_stages_bubble": plan.equal_stages_bubble,
            "partitions": plan.partitions,
            "kept_graphs": plan.kept_graphs,
            "parameters": plan.parameters,
            "evaluated_parameters": plan.evaluated_parameters,
            **({} if (lost := tracker.find_lost()) is None else {LOST: lost}),
        },
        gpus=[torch.cuda.get_device_name(index) for index in range(num_gpus)],
        num_cores=place.num_cores,
    )
    write_record(folder / RECORD_FILE, record)
    if has_picture:
        tracker.log_picture(summary.num_steps, "timeline", folder / PICTURE_FILE)
    tracker.log_outcome(summary.num_steps, _flatten(summary.as_dict()))
    more = f"\n{suggest(folder, run, summary, overrides)}" if hints else ""
    print(f"\n{_describe(run, summary)}{bubbles}{more}", flush=True)


def _write_timeline(folder: Path, plan: Plan, measured: Timeline) -> tuple[str, bool]:
    """Write a step as a trace for Perfetto, and as a picture above its simulation.

    In the simulation every task takes its mean measured time, each stage has its own device, and transfers take no
    time. A file that cannot be written causes only a warning.

    Returns:
        A line on the step's bubble, and whether the picture was written.
    """
    num_microbatches = 1 + max(event.task.micro_batch for event in measured.events)
    schedule = replace(plan.setting, num_microbatches=num_microbatches).tasks
    simulated = simulate(schedule, measured.mean_seconds())
    shown = {"measured": measured, "simulated": simulated}
    has_picture = _write_extra(folder / PICTURE_FILE, lambda path: plot(shown, path))
    has_trace = _write_extra(folder / TRACE_FILE, measured.write_trace)
    if plan.bubble is None:  # the stages take turns in one process
        return "", has_picture
    files = [PICTURE_FILE] * has_picture + [f"{TRACE_FILE} opens in ui.perfetto.dev"] * has_trace
    where = f" ({'; '.join(files)})" if files else ""
    return (
        f"\nPlanned {describe_bubble(plan)}; {simulated.bubble:.1%} simulated from the tasks' measured seconds, "
        f"{measured.bubble:.1%} measured{where}."
    ), has_picture


def _write_extra(path: Path, write: Callable[[Path], None]) -> bool:
    """Write a file that a run can do without; return whether that worked, and warn if not."""
    try:
        with replacing(path) as partial:
            write(partial)
    except Exception as error:  # noqa: BLE001 - matplotlib's own settings may be wrong, the disk full
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(f"warning: {path.name} was not written ({reason}): the run is complete without it.", file=sys.stderr)
        return False
    return True


def _flatten(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the outcome by name, including those of each evaluation set."""
    figures = {key: value for key, value in results.items() if key not in ("evaluation", "least_loss")}
    for name, metrics in results["evaluation"].items():
        figures |= {f"{name}/{metric}": value for metric, value in metrics.items()}
    return figures


def _describe(run: RunConfig, summary: Summary) -> str:
    """Return one line on the result, with a remedy if training waited long for data."""
    minutes, seconds = divmod(round(summary.seconds), 60)
    took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    waited = summary.wait_seconds / max(summary.seconds, 1e-9)
    took += f", {waited:.1%} of it waiting for data" + (" (raise data.num_workers)" if waited > 0.1 else "")
    name_of_set, metrics = next(iter(summary.evaluation.items()), ("", {}))
    figures = (("F1", metrics.get("f1")), ("top-1", summary.top1), ("top-5", summary.top5))
    accuracy = ", ".join(f"{figure} {value:.1%}" for figure, value in figures if value is not None)
    accuracy += f", loss {metrics['loss']:.3f}" if metrics else ""
    if "raw_top1" in metrics:
        accuracy += f" (top-1 {metrics['raw_top1']:.1%} without averaging the weights)"
    result = f"{accuracy} on the {name_of_set} {summary.examples}" if accuracy else "not evaluated"
    replaced = f" {summary.num_replaced} broken {summary.examples} were replaced." if summary.num_replaced else ""
    more = replaced + _describe_patience(run, summary)
    return f"{run.name}: {result} after {summary.num_steps} steps in {took}.{more}"


def _describe_patience(run: RunConfig, summary: Summary) -> str:
    """Say that patience ended the training, with the best evaluation's figures; "" if it did not."""
    best, patience = summary.least_loss, run.trainer.evaluation.patience
    if patience is None or _is_whole(run, summary):
        return ""
    top1 = f", top-1 {best['top1']:.1%}" if "top1" in best else ""
    return (
        f"\nIt ended there because {patience} evaluations in a row had no lower loss than the one after step "
        f"{best['step']:.0f}: loss {best['loss']:.3f}{top1}."
    )


def suggest(folder: Path, run: RunConfig, summary: Summary, overrides: Sequence[str]) -> str:
    """Return the names of the run's files, and commands to try next."""
    commands = {}
    if run.trainer.checkpoints.keep is not None:
        commands["train on"] = _command(overrides, *_lengthen(run, summary), make_word("trainer.resume_from", folder))
        if isinstance(run.model, TranslationModelConfig):
            commands["translate"] = shlex.join(["python", "translate.py", f"checkpoint={folder}", "text=Danke"])
        if isinstance(run.model, TimmConfig | TransformersConfig):
            best = folder / "checkpoints" / "best"
            words = ["python", "-m", "gpipe.checkpoint", "export", str(best if best.exists() else folder)]
            commands["export"] = shlex.join([*words, "--output", f"{run.model.name}/model.safetensors"])
    if run.pipeline.num_stages > 1:
        commands["without pipeline"] = _command(overrides, *_merge_stages(run))
    if (experiment := _PAPERS.get(type(run.model), run.name)) != run.name:
        commands["the paper's plan"] = f"python train.py +experiment={experiment} trainer.dry_run=true"
    files = ", ".join(sorted(path.name for path in folder.glob("[!.]*")))
    return f"Files in {folder}: {files}\nTry next:\n" + "\n".join(f"  {to:<17} {what}" for to, what in commands.items())


def _lengthen(run: RunConfig, summary: Summary) -> list[str]:
    """Return the overrides that continue the training: twice the length, or no patience."""
    trainer = run.trainer
    if not _is_whole(run, summary):
        return ["trainer.evaluation.patience=null"]
    # Both: the shorter one counts.
    steps = [] if trainer.max_steps is None else [f"trainer.max_steps={2 * trainer.max_steps}"]
    return [f"trainer.num_epochs={2 * trainer.num_epochs}", *steps]


def _is_whole(run: RunConfig, summary: Summary) -> bool:
    trainer = run.trainer
    return summary.num_epochs >= trainer.num_epochs or summary.num_steps >= (trainer.max_steps or sys.maxsize)


def _merge_stages(run: RunConfig) -> list[str]:
    """Return the overrides that train the model in one process, as one stage."""
    alone = ["pipeline.num_stages=1", "launch.num_processes=1"]
    if run.launch.num_replicas > 1:
        alone.append("launch.num_replicas=1")
    if run.pipeline.partitions is not None:
        alone.append("pipeline.partitions=null")
    if run.pipeline.stages_per_device > 1:  # 1F1B has the same gradients, to the last bit
        alone += ["pipeline.schedule=1f1b", "pipeline.stages_per_device=1"]
    return alone


def _command(overrides: Sequence[str], *changes: str) -> str:
    """Return the command of a run with these overrides; changes replace overrides of the same keys."""
    changed = {change.partition("=")[0] for change in changes}
    kept = [item for item in overrides if item.lstrip("+").partition("=")[0] not in changed]
    return shlex.join(["python", "train.py", *kept, *changes])
