"""The planner as a user starts it."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn

from gpipe.config import ConfigError, register_schemas, to_run
from gpipe.config.plan import Find, PlanConfig
from gpipe.planning.accelerator import ACCELERATORS, GIB, LayerSeconds
from gpipe.planning.calibration import Calibration
from gpipe.programs import train as train_program
from gpipe.programs.plan import find_devices, start
from gpipe.tracing.traced_layers import TracedLayers, as_layers
from tests.support.program_server import run_program

ROOT = Path(__file__).parents[2]
SMALL = ("model.num_filters=8", "data.image_size=32", "trainer.batch_size=16", "trainer.evaluation.batch_size=16")
NO_SWEEP = "error: -m, or hydra.mode=MULTIRUN, asks for a sweep, expected one plan: start plan.py once for each.\n"
Plan = Callable[..., str]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """Plan in this process, and return what is printed: the answer, or the message of the error."""
    monkeypatch.setattr("gpipe.programs.plan._QUIET_SECONDS", math.inf)  # a busy machine tells of a search's progress

    def printed(*overrides: str) -> str:
        try:
            composed = to_run(compose("plan", overrides=list(overrides)))
            assert isinstance(composed, PlanConfig)
            start(composed)
        except SystemExit:
            return capsys.readouterr().err
        except ValueError as error:
            return f"error: {error}"
        return capsys.readouterr().out

    register_schemas(PlanConfig)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield printed
    register_schemas()


def test_a_plan_has_a_row_per_stage_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run_program(ROOT / "plan.py", *SMALL, "pipeline.num_stages=3", "device=tpu_v2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["0", "1", "2"]
    assert "fits: stage" in done.stdout and "of 8.0 GiB" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_named_with_what_would(plan: Plan) -> None:
    last = plan(*SMALL, "device=tpu_v2", "memory_gib=0.0011").strip().splitlines()[-1]
    assert re.fullmatch(r"does not fit: stage \d needs 0\.00\d+ GiB of 0\.0011 GiB; .*[KM] = \d+ fits", last)


def test_an_evaluation_has_to_fit_too(plan: Plan) -> None:
    settings = (*SMALL, "memory_gib=0.02", "trainer.evaluation.batch_size=2048")
    *_, totals, _, _, last = plan(*settings).strip().splitlines()
    assert re.search(r"of activations\. An evaluation needs 0\.\d+ GiB\.$", totals)
    assert re.fullmatch(
        r"does not fit: stage 0 needs 0\.\d+ GiB of 0\.02 GiB in an evaluation; no larger K and no larger M "
        r"fits: lower trainer\.evaluation\.batch_size",
        last,
    )
    assert "in an evaluation" not in plan(*settings, "trainer.evaluation.every_epochs=null").splitlines()[-1]


def test_a_translation_is_planned_with_all_its_micro_batches(plan: Plan) -> None:
    words = ("model=translation_small", "data=multilingual_embedded", "trainer.evaluation.every_epochs=null")
    words += ("pipeline.num_microbatches=8", "launch=process_per_stage")
    shorter, longest = (plan(*words, f"trainer.batch_size={size}") for size in (1024, 2048))
    assert "M=8 micro-batches of up to 1, N=4, " in shorter and "M=8 micro-batches of 1, N=8, " in longest
    bubbles = [re.findall(r"\((.*)% if all stages were equal\)", said) for said in (shorter, longest)]
    assert len(bubbles[0]) == 1 and bubbles[0] == bubbles[1]


def test_the_largest_is_planned_as_a_later_plan_of_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [LayerSeconds(1.0, 1.0, 2.0)] * 10  # nine layers and the loss
    monkeypatch.setattr("gpipe.programs.plan.find_calibration", lambda *_: Calibration({}, 2, seconds, seconds, 1.0))
    found, _, planned = plan(*SMALL, "memory_gib=0.002", "find=num_filters").partition("\n")
    (size,) = re.findall(r"^The largest num_filters that fits is (\d+)\.$", found)
    assert plan(*SMALL, "memory_gib=0.002", f"model.num_filters={size}") == planned


def test_the_fewest_layers_that_give_each_stage_one_are_tried(plan: Plan) -> None:
    words = ("model=transformer_lm_small", "data=random_tokens", "data.sequence_length=16", "model.model_size=64")
    words += ("trainer.evaluation.every_epochs=null", "pipeline.num_stages=8", "memory_gib=0.0035", "find=num_layers")
    said = plan(*words, "data.vocabulary_size=1000", "trainer.batch_size=8", "device=cpu")
    assert said.startswith("The largest num_layers that fits is 6.\n")


@pytest.mark.slow
def test_a_larger_model_is_found_for_more_stages_than_this_one_has_layers(plan: Plan) -> None:
    said = plan(*SMALL, "pipeline.num_stages=12", "memory_gib=0.001", "find=num_layers")
    assert re.match(r"The largest num_layers that fits is (1[2-9]|[2-9]\d)\.\n", said), said


def test_the_largest_is_found_within_a_memory_limit(plan: Plan) -> None:
    """The limit lets cuts that exceed it be chosen otherwise, so no fewer layers fit than in as little memory."""
    found = []
    for limit in (f"pipeline.memory_limit_bytes={2**20}", f"memory_gib={2**-10}"):
        said = plan(*SMALL, limit, "find=num_layers")
        found += map(int, re.findall(r"^The largest num_layers that fits is (\d+)\.$", said, re.MULTILINE))
    within, without = found
    assert within >= without >= 3


def test_the_parameters_of_training_alone_are_told_apart(plan: Plan) -> None:
    plain, with_head = (plan(*SMALL, f"model.auxiliary_head={head}") for head in ("false", "true"))
    (number,) = re.findall(r"^([\d,]+) parameters\. All", plain, re.MULTILINE)
    assert f"{number} parameters in the network that is evaluated, " in with_head
    assert re.search(r", [\d,]+ with the auxiliary head of training\. All", with_head)


def test_the_fastest_settings_are_printed_and_the_first_is_planned(tmp_path: Path) -> None:
    words = ("pipeline=auto", "device=h100", "num_devices=2", "pipeline.schedule=1f1b")
    done = run_program(ROOT / "plan.py", *SMALL, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    choices = [[cell.strip() for cell in row] for row in rows if len(row) == 8]
    assert choices[0][-1] == "chosen"
    assert all(row[-1] == "as fast" if row[4] == choices[0][4] else row[-1].startswith("+") for row in choices[1:])
    assert {row[1] for row in choices} == {"1f1b"} and len(choices) == 2
    seconds = [float(row[4]) for row in choices]
    assert seconds == sorted(seconds) and f"Planned step: {choices[0][4]}" in done.stdout


def test_devices_that_are_not_here_must_be_counted(tmp_path: Path) -> None:
    done = run_program(ROOT / "plan.py", *SMALL, "pipeline=auto", "device=h100", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "error: num_devices is null, expected how many h100 pipeline=auto may use: set num_devices=8, for example.\n"
    )


@pytest.mark.usefixtures("plan")
def test_the_pipeline_is_chosen_within_the_limits_of_the_device_at_hand_too() -> None:
    words = ("launch.device=cpu", "memory_gib=0.05", "link_gb_per_second=2", "num_devices=2")
    runs = (to_run(compose("plan", overrides=[f"device={name}", *words])) for name in ("auto", "cpu"))
    auto, cpu = map(find_devices, runs)
    assert auto == cpu and auto.room_bytes < 0.05 * GIB and auto.accelerator.link_bandwidth == 2e9


@pytest.mark.usefixtures("plan")
def test_processes_count_devices_and_do_not_differ_from_them() -> None:
    plans = [to_run(compose("plan", overrides=["device=h100", *words])) for words in ([], ["num_devices=4"])]
    assert [find_devices(plan, 4).count for plan in plans] == [4, 4]
    with pytest.raises(ConfigError, match=r"^num_devices is 4, but launch.num_processes is 8, expected the same"):
        find_devices(plans[1], 8)


@pytest.mark.usefixtures("plan")
def test_more_devices_than_a_job_may_have_processes_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^num_devices is 4097, expected a number from 1 to 4096, or null: "):
        to_run(compose("plan", overrides=["device=h100", "num_devices=4097"]))


def test_a_limit_that_no_size_fits_is_named(plan: Plan) -> None:
    assert plan(*SMALL, "device=h100", "find=num_layers", "pipeline.memory_limit_bytes=1000") == (
        "error: find is num_layers, but even 3 does not fit h100 with pipeline.memory_limit_bytes=1000: raise that, "
        "pipeline.num_stages or pipeline.num_microbatches.\n"
    )


def test_layers_are_measured_once_for_all_later_plans(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "pipeline.num_microbatches=2", "launch=process_per_stage", "trainer.autocast=auto")
    measured = "The seconds of the layers are measured"
    assert measured not in plan(*words)
    done = run_program(ROOT / "plan.py", *words, "calibrate=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("runs/calibrations/amoebanet-*.json")
    assert f"with micro-batches of 8, are in {path.relative_to(tmp_path)}" in done.stdout
    later = plan(*words)
    assert measured in later and later == done.stdout.partition("\n")[2]
    dry = run_program(ROOT / "train.py", *words, "trainer.dry_run=true", folder=tmp_path)
    assert dry.stdout == later
    kernels = ("trainer.deterministic=true", "trainer.float32_matmul_precision=high")
    for other in ("model.num_filters=16", "device=h100", "trainer.autocast=bfloat16", "launch.num_threads=2", *kernels):
        assert measured not in plan(*words, other)


def test_settings_are_refused_before_layers_are_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.programs.plan.calibrate", lambda _: pytest.fail("measures"))
    said = plan(*SMALL, "calibrate=true", "trainer.batch_size=64", "pipeline.num_stages=30")
    assert said == "error: pipeline.num_stages is 30, but the model has 9 layers: set it to 9 or less.\n"


def test_only_this_machine_can_be_measured(plan: Plan) -> None:
    said = plan(*SMALL, "device=h100", "calibrate=true")
    assert said.startswith("error: calibrate is true, but device is h100: measure on a machine that has one")


def test_the_cut_by_memory_has_the_lowest_peak(plan: Plan) -> None:
    peaks = {}
    for partition_by in ("flops", "memory"):
        said = plan(*SMALL, "pipeline.num_stages=3", f"pipeline.partition_by={partition_by}")
        peaks[partition_by] = float(re.findall(r"fits: stage \d needs (\S+) GiB", said)[0])
    assert peaks["memory"] <= peaks["flops"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["device=tpu_v9"], f"device is tpu_v9, expected auto or one of {', '.join(ACCELERATORS)}: set device="),
        (
            ["pipeline.num_stages=30", "trainer.batch_size=64"],
            "pipeline.num_stages is 30, but the model has 9 layers: set it to 9 or less.",
        ),
        (["efficiency=2"], "efficiency is 2.0, expected a share in (0, 1]: set efficiency=... accordingly."),
        (["memory_gib=0"], "memory_gib is 0.0, expected a number above 0, or null: set memory_gib="),
        (["find=num_filters", "memory_gib=0.0001"], "find is num_filters, but even 16 does not fit cpu: raise"),
        (
            ["find=num_filters", "model=transformer_lm", "data=random_tokens"],
            "find is num_filters, but a transformer_lm",
        ),
    ],
)
def test_bad_input_is_one_sentence(plan: Plan, overrides: list[str], said: str) -> None:
    message = plan(*overrides).strip()
    assert message.startswith(f"error: {said}") and "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")))
def test_a_dry_run_prints_what_the_planner_prints(
    plan: Plan,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    experiment: str,
) -> None:
    if not experiment.endswith("_laptop"):  # nothing to look for that fits
        roomy = replace(ACCELERATORS["cpu"], memory_bytes=2**50)
        monkeypatch.setattr("gpipe.programs.layout.detect_accelerator", lambda _: roomy)
    overrides = [f"+experiment={experiment}"]
    if experiment.startswith("transfer_") or experiment == "transfer":
        overrides.append("init_from=null")
    if experiment.startswith("image_classification"):
        overrides.append("data.num_classes=10")  # else the user's images tell
    planned = plan(*overrides)
    register_schemas()
    run = to_run(compose("train", overrides=[*overrides, "trainer.dry_run=true"]))
    train_program.launch_training(run, tmp_path, overrides)
    assert capsys.readouterr().out == planned
    assert planned.startswith(f"{run.name}: K={run.pipeline.num_stages} stages, ")
    assert (" bubble " in planned) == (run.launch.num_processes > 1)


def test_a_model_of_another_library_is_cut_up_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []  # names, since the layers themselves are kept as long as somebody holds them

    def cutting(model: nn.Module, example: Any) -> TracedLayers:
        cut.append(type(model).__name__)
        return as_layers(model, example)

    monkeypatch.setattr("gpipe.programs.workloads.traced_model.as_layers", cutting)
    words = ["+experiment=image_classification_laptop", "model.name=test_resnet", "data.num_classes=10"]
    assert " stages, " in plan(*words, "data.image_size=40")  # a size that no other test has described
    assert len(cut) == 1
    cut.clear()
    register_schemas()
    run = to_run(compose("train", overrides=[*words, "data.image_size=56", "trainer.dry_run=true"]))
    train_program.launch_training(run, tmp_path, words)
    assert len(cut) == 1


def test_the_headline_run_takes_at_most_four_and_a_half_seconds_per_step(plan: Plan) -> None:
    planned = plan("+experiment=amoebanet_imagenet", "device=h100")
    assert "K=4 stages, M=32 micro-batches of 32, N=1024, gpipe, recompute always, on h100" in planned
    (seconds,) = re.findall(r"^Planned step: ([\d.]+) s, ", planned, re.MULTILINE)
    assert float(seconds) <= 4.5
    assert "\nfits: " in planned


def test_the_help_names_every_device_and_what_can_be_found() -> None:
    text = OmegaConf.load(ROOT / "conf" / "plan.yaml").hydra.help.template
    assert "|".join(ACCELERATORS) in text
    assert all(find.value in text for find in Find)
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["num_devices=4"], "error: num_devices is 4, expected null without pipeline=auto: set pipeline=auto, or"),
        (["evaluate=runs/a"], "error: evaluate is runs/a, expected null: plan.py plans a training; leave it out, and"),
        (["-m", "seed=0,1"], NO_SWEEP),
        (["hydra.mode=MULTIRUN", "seed=0,1"], NO_SWEEP),
    ],
)
def test_what_a_plan_would_ignore_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    done = run_program(ROOT / "plan.py", *SMALL, *words, folder=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(said)
    assert list(tmp_path.iterdir()) == []
