"""The commands that a run suggests at its end do what they say."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose

from gpipe.config import RunConfig, to_run
from gpipe.pipeline.schedule import Rematerialize
from gpipe.pipeline.timeline import Event, Timeline
from gpipe.planning.step import Setting
from gpipe.programs import outcome
from gpipe.programs.outcome import suggest
from gpipe.training.summary import Summary, Totals

pytestmark = pytest.mark.usefixtures("composer")
TOKENS = ("model=transformer_lm_small", "data=random_tokens")
TRANSLATION = ("model=translation_small", "data=multilingual_embedded")


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*overrides]))


@pytest.mark.parametrize("failing", ["timeline.png", "timeline.json"])
def test_a_timeline_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    def fail(_: object, path: Path) -> None:
        path.write_text("half of it")
        raise ValueError("Key backend: 'nonsense' is not a valid value\nfor backend")

    if failing == "timeline.png":
        monkeypatch.setattr(outcome, "plot", fail)
    else:
        monkeypatch.setattr(Timeline, "write_trace", fail)
    setting = Setting(2, 1, Rematerialize.NEVER)
    events = [Event(task, 0.0, 1.0) for tasks in setting.tasks for task in tasks]
    plan = SimpleNamespace(setting=setting, bubble=None)
    found = outcome._write_timeline(tmp_path, plan, Timeline(tuple(events), 2, (0, 1)))
    assert found == ("", failing != "timeline.png")
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.png", "timeline.json"} - {failing}
    assert capsys.readouterr().err == (
        f"warning: {failing} was not written (ValueError: Key backend: 'nonsense' is not a valid value): the run is "
        "complete without it.\n"
    )


def summary_of(num_steps: int, num_epochs: int) -> Summary:
    return Totals().summarize(num_steps, num_epochs, None, "images", 1)


def suggested(run: RunConfig, summary: Summary, *overrides: str) -> dict[str, str]:
    lines = suggest(Path("runs/a"), run, summary, overrides).partition("Try next:\n")[2].splitlines()
    return {line[:19].strip(): line[20:].strip() for line in lines}


@pytest.mark.parametrize(
    ("overrides", "experiment"),
    [((), "amoebanet_imagenet"), (TOKENS, "table2_transformer_lm"), (TRANSLATION, "transformer_multilingual")],
)
def test_the_papers_plan_is_that_of_the_same_family_of_models(overrides: tuple[str, ...], experiment: str) -> None:
    run, summary = run_of(*overrides), summary_of(3, 3)
    found = suggested(run, summary)
    assert found["the paper's plan"] == f"python train.py +experiment={experiment} trainer.dry_run=true"
    assert ("translate" in found) == (overrides == TRANSLATION)
    assert "the paper's plan" not in suggested(replace(run, name=experiment), summary)


@pytest.mark.parametrize(
    ("overrides", "summary", "lengthened"),
    [
        (["trainer.num_epochs=3"], summary_of(12, 3), "trainer.num_epochs=6"),
        (["trainer.max_steps=9"], summary_of(9, 2), "trainer.num_epochs=6 trainer.max_steps=18"),
        (["trainer.max_steps=99"], summary_of(12, 3), "trainer.num_epochs=6 trainer.max_steps=198"),
        (
            ["trainer.max_steps=9", "trainer.evaluation.patience=1"],
            summary_of(4, 1),
            "trainer.max_steps=9 trainer.evaluation.patience=null",
        ),
    ],
)
def test_to_train_on_is_to_train_more(overrides: list[str], summary: Summary, lengthened: str) -> None:
    """Also where the epochs ended before `max_steps`, and after early stopping."""
    command = suggested(run_of(*overrides), summary, *overrides)["train on"]
    assert command == f"python train.py {lengthened} trainer.resume_from=runs/a"


@pytest.mark.parametrize("folder", ["runs/a", "runs/ös terreich", 'runs/a, [b] "c"', "runs/{x: ${y}}"])
def test_hydra_reads_the_folder_that_a_command_names(folder: str) -> None:
    command = suggest(Path(folder), run_of(), summary_of(3, 3), []).partition("train on")[2].partition("\n")[0]
    words = shlex.split(command)[2:]
    assert compose("train", overrides=words).trainer.resume_from == folder


def test_what_a_command_needs_to_find_its_settings_stays() -> None:
    words = ["--config-dir", "my conf", "data=cats", "pipeline.num_stages=3"]
    command = suggested(run_of(), summary_of(3, 3), *words)["without pipeline"]
    assert command.startswith("python train.py --config-dir 'my conf' data=cats pipeline.num_stages=1 ")


def test_without_a_pipeline_one_process_has_one_stage() -> None:
    words = [
        "launch=process_per_stage", "++launch.num_replicas=2", "pipeline.schedule=interleaved_1f1b",
        "pipeline.num_stages=4", "pipeline.stages_per_device=2", "pipeline.partitions=[2,2,2,3]",
    ]  # fmt: skip
    command = suggested(run_of(*words), summary_of(3, 3), *words)["without pipeline"]
    run = run_of(*shlex.split(command)[2:])
    assert (run.launch.num_processes, run.launch.num_replicas) == (1, 1)
    assert (run.pipeline.num_stages, run.pipeline.stages_per_device, run.pipeline.partitions) == (1, 1, None)
    assert command.count("num_replicas") == 1


def test_the_best_checkpoint_is_exported_if_there_is_one(tmp_path: Path) -> None:
    def suggest_export() -> str:
        said = suggest(tmp_path, run_of("model=timm", "model.name=resnet18"), summary_of(3, 3), [])
        return said.partition("  export ")[2].split()[4]

    assert suggest_export() == str(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").touch()
    assert suggest_export() == str(tmp_path / "checkpoints" / "best")


def test_a_run_without_a_pipeline_or_checkpoints_suggests_neither() -> None:
    run = run_of("pipeline.num_stages=1", "trainer.checkpoints.keep=null")
    assert list(suggested(run, summary_of(3, 3))) == ["the paper's plan"]


def test_what_ended_a_training_early_and_its_best_evaluation_are_said() -> None:
    totals = Totals()
    for step, loss in ((1, 2.0), (2, 2.5), (3, 3.0)):
        totals.add_evaluation({"test": {"loss": loss, "top1": 0.1 * step, "f1": 0.25}}, step)
    summary = totals.summarize(3, 1, None, "images", 1)
    run = run_of("trainer.max_steps=9", "trainer.evaluation.patience=2")
    said = outcome._describe(run, summary)
    assert said.splitlines()[1] == (
        "It ended there because 2 evaluations in a row had no lower loss than the one after step 1: loss 2.000, top-1 "
        "10.0%."
    )
    assert f"{run.name}: F1 25.0%, top-1 30.0%, loss 3.000 on the test images after 3 steps" in said
    assert "\n" not in outcome._describe(run_of("trainer.max_steps=3", "trainer.evaluation.patience=2"), summary)
