"""pipeline=auto: what is open is chosen, and what is said stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from gpipe import launch
from gpipe.config import ConfigError, RunConfig, to_run
from gpipe.launch import stops
from gpipe.launch.processes import Place
from gpipe.planning.accelerator import EFFICIENCY, Accelerator, LayerSeconds, find_accelerator
from gpipe.planning.calibration import Calibration
from gpipe.programs import automatic, calibration_files
from gpipe.programs.automatic import DevicesToUse, choose_pipeline, find_devices_at_hand, is_open, spell_out
from gpipe.programs.build import build_layers
from gpipe.programs.layout import build_planner, build_setting, share_layout
from gpipe.records import RECORD_FILE, read_records
from tests.support.program_server import run_program

pytestmark = pytest.mark.usefixtures("composer")
ROOT = Path(__file__).parents[2]
SMALL = ("model.num_filters=8", "data.image_size=32", "trainer.batch_size=16", "tracking=disabled", "pipeline=auto")


def devices(count: int, room_bytes: int = 2**40) -> DevicesToUse:
    return DevicesToUse(find_accelerator("v100"), count, room_bytes, EFFICIENCY)


def choose(*words: str, count: int = 4, room_bytes: int = 2**40) -> RunConfig:
    composed = compose("train", overrides=[*SMALL, *words])
    assert is_open(composed)
    return to_run(choose_pipeline(composed, words, lambda _, named: devices(named or count, room_bytes)))


def patch_host(monkeypatch: pytest.MonkeyPatch, num_bytes: int = 32 * 2**30) -> None:
    """Make this a host with 8 cores, and torchrun's variables unset."""
    monkeypatch.setattr(automatic, "_host_bytes", lambda: num_bytes)
    monkeypatch.setattr(automatic, "own_cores", lambda: set(range(8)))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_every_device_is_used_and_a_second_search_finds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    run = choose()
    assert run.launch.num_processes == 4
    assert run.launch.num_replicas * run.pipeline.num_stages // run.pipeline.stages_per_device == 4
    printed = capsys.readouterr().out
    assert "The fastest ways to run it on 4 x v100, planned:" in printed
    size = 16 // run.launch.num_replicas // run.pipeline.num_microbatches
    assert f"Batch norm sees {size} examples at once with the first of these" in printed
    assert choose() == run


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_request_to_stop_ends_the_search(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stops, "find_reason", lambda: "SIGINT")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as left:
        choose()
    assert left.value.code == stops.STOPPED
    said = "stopped by SIGINT before the first step: repeat the command to resume.\n"
    assert capsys.readouterr().out == (said if rank == "0" else "")


def test_batch_norm_sees_the_examples_of_all_replicas_that_it_normalises_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "pipeline.synchronize_batch_norm=true", "pipeline.rematerialize=always", "launch.num_replicas=2"
    run = choose(*words, "pipeline.num_stages=1", count=2)
    assert f"Batch norm sees {16 // run.pipeline.num_microbatches} examples at once" in capsys.readouterr().out


def test_nothing_is_said_of_batch_norm_where_it_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    choose("pipeline.num_microbatches=4")
    choose_pipeline(compose("train", overrides=list(TEXT)), (), lambda *_: devices(2))
    assert "Batch norm sees" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["pipeline.num_stages=4", "pipeline.num_microbatches=3", "pipeline.rematerialize=always"],
        ["pipeline.schedule=zb_v", "launch.num_replicas=1"],
        ["pipeline.schedule=interleaved_1f1b", "launch.num_replicas=2"],
        ["pipeline.stages_per_device=2"],
        ["pipeline.rematerialize=fit"],
        ["pipeline.partitions=[5,4]"],
    ],
    ids=" ".join,
)
def test_what_the_command_line_says_stays(words: list[str]) -> None:
    run = choose(*words)
    for word in words:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        found = getattr(getattr(run, section), name)
        found = str(getattr(found, "value", found)).replace(" ", "")
        assert found == value or (value == "fit" and found == "never")


def test_the_stages_per_device_follow_from_any_number_of_stages() -> None:
    fixed = "pipeline.num_microbatches=1", "pipeline.rematerialize=always", "trainer.evaluation.every_epochs=null"
    found = choose("pipeline.schedule=interleaved_1f1b", "pipeline.num_stages=9", *fixed, count=3).pipeline
    assert (found.num_stages, found.stages_per_device) == (9, 3)


def test_layers_that_were_measured_count_as_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search and its table are those of the calibration: here of a first layer that takes three seconds."""
    words = ("pipeline.num_microbatches=4", "launch.num_replicas=1")
    run = to_run(compose("train", overrides=[*SMALL[:-1], words[0]]))
    accelerator = find_accelerator("v100")
    _, planned, _ = build_planner(run, accelerator).describe(build_setting(run, accelerator))
    measured = [LayerSeconds(1.0, 1.0, 2.0), *planned[1:]]
    seconds = []
    for calibration in (None, Calibration({}, 4, measured, planned, 1e-3)):

        def find(run: RunConfig, accelerator: Accelerator, found: Calibration | None = calibration) -> Any:
            return found if run.launch.num_threads == 4 else pytest.fail("not the threads of one of two processes")

        monkeypatch.setattr(calibration_files, "find_calibration", find)
        monkeypatch.setattr(launch.devices, "own_cores", lambda: list(range(8)))
        choose(*words, "launch.num_threads=null", count=2)
        (row,) = (line for line in capsys.readouterr().out.splitlines() if " chosen " in line)
        seconds.append(float(row.split("│")[5]))
    assert seconds[0] < 1 and 12 <= seconds[1] < 13, "four micro-batches, forward and backward"


def test_a_split_that_does_not_pay_is_not_chosen() -> None:
    """Of the AmoebaNet that experiments.zero_bubble measures: there no split schedule is faster than 1F1B."""
    words = (
        "model.num_layers=6", "model.num_filters=32", "data.image_size=64", "trainer.batch_size=32",
        "launch.num_replicas=1", "pipeline.num_microbatches=4", "pipeline.num_stages=2",
    )  # fmt: skip
    composed = compose("train", overrides=[*SMALL, *words])
    two_cores = DevicesToUse(find_accelerator("cpu"), 2, 2**34, EFFICIENCY)
    run = to_run(choose_pipeline(composed, words, lambda *_: two_cores))
    assert run.pipeline.schedule.value in ("gpipe", "1f1b")


@pytest.mark.parametrize("word", ["launch.num_processes=2", "++launch.num_processes=2", "launch={num_processes:2}"])
def test_a_number_of_processes_on_the_command_line_is_the_number_of_devices(word: str) -> None:
    assert choose(word).launch.num_processes == 2


def test_less_memory_is_recomputed_for_and_the_run_cuts_alike() -> None:
    words = ("launch.num_replicas=1", "pipeline.num_microbatches=8", "pipeline.schedule=gpipe")
    words += ("trainer.evaluation.batch_size=8",)
    assert choose(*words, count=2).pipeline.rematerialize.value == "never"
    room = 700_000
    tight = choose(*words, count=2, room_bytes=room)
    assert tight.pipeline.rematerialize.value in ("fit", "always", "except_last")
    assert tight.pipeline.memory_limit_bytes == room
    layout = share_layout(tight, build_layers(tight), Place(None, "cpu"))
    assert layout.planned is not None and len(layout.partitions) == 2


def test_what_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^pipeline is auto, with pipeline.num_stages=4, but nothing fits 4 x v100"):
        choose("pipeline.num_stages=4", room_bytes=1024)
    with pytest.raises(ConfigError, match=r"^pipeline is auto, but nothing fits 2 x v100 with 9.54e-07 GiB each: use"):
        choose(room_bytes=1024, count=2)


def find_refusal(choose_any: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_any()
    return str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["launch.num_replicas=3"],
        ["pipeline.num_stages=7"],
        ["pipeline.num_stages=2", "launch.num_processes=1"],
        ["trainer.batch_size=17", "pipeline.num_stages=2", "launch.num_replicas=2"],
    ],
)
def test_what_does_not_divide_the_devices_is_named(words: list[str]) -> None:
    size = 17 if "trainer.batch_size=17" in words else 16
    count = 1 if "launch.num_processes=1" in words else 4
    said = ", ".join(word for word in words if not word.startswith("trainer"))
    assert find_refusal(lambda: choose(*words)) == (
        f"pipeline is auto, with {said}, but that does not divide {count} x v100, and the {size} images of a planned "
        "mini-batch, into equal parts: change it, or leave it to the planner."
    )


@pytest.mark.parametrize(
    "words",
    [
        ("trainer.batch_size=12", "data.mixup=0.8"),
        ("trainer.cuda_graphs=true", "pipeline.synchronize_batch_norm=true"),
    ],
)
def test_replicas_that_the_settings_refuse_are_not_chosen(words: tuple[str, ...]) -> None:
    """Four replicas would be fastest."""
    fixed = "pipeline.num_microbatches=1", "pipeline.rematerialize=never", "pipeline.schedule=gpipe"
    words = (*SMALL, "data.image_size=64", "model.num_filters=64", "model.num_layers=3", *fixed, *words)
    four_cores = DevicesToUse(find_accelerator("cpu"), 4, 2**36, EFFICIENCY)
    run = to_run(choose_pipeline(compose("train", overrides=list(words)), words, lambda *_: four_cores))
    assert run.launch.num_replicas < 4


SENTENCES = ("model=translation_small", "data=multilingual_embedded", "tracking=disabled", "pipeline=auto")


@pytest.mark.parametrize(("num_tokens", "num_replicas"), [(1026, 2), (1792, 2), (512, 4)])
def test_replicas_share_the_tokens_of_a_mini_batch(num_tokens: int, num_replicas: int) -> None:
    """Of which the longest sentence takes 256."""
    words = (*SENTENCES, f"trainer.batch_size={num_tokens}", f"launch.num_replicas={num_replicas}")
    run = to_run(choose_pipeline(compose("train", overrides=list(words)), words, lambda *_: devices(num_replicas)))
    assert run.launch.num_replicas == num_replicas


def test_what_replicas_cannot_share_is_named() -> None:
    words = (*SENTENCES, "trainer.batch_size=1026", "launch.num_replicas=4")
    composed = compose("train", overrides=list(words))
    tokens = find_refusal(lambda: choose_pipeline(composed, words, lambda *_: devices(4)))
    assert "but that does not divide 4 x v100, and the 1026 tokens of a mini-batch, into equal parts: " in tokens
    pairs = find_refusal(lambda: choose("trainer.batch_size=12", "data.mixup=0.8", "launch.num_replicas=4"))
    assert "but that does not divide 4 x v100, and the 6 pairs of images of a mini-batch, into equal parts: " in pairs


TEXT = (
    "model=transformer_lm_small", "model.num_layers=3", "data=random_tokens", "data.sequence_length=16",
    "data.vocabulary_size=1000", "model.model_size=64", "trainer.batch_size=8", "tracking=disabled", "pipeline=auto",
)  # fmt: skip


def test_more_micro_batches_than_examples_stay_as_they_are_said() -> None:
    """An evaluation may have more examples, and is planned with as many micro-batches."""
    words = (*TEXT, "pipeline.num_microbatches=16")
    run = to_run(choose_pipeline(compose("train", overrides=list(words)), words, lambda *_: devices(2)))
    assert run.pipeline.num_microbatches == 16


@pytest.mark.parametrize(
    ("words", "count", "room_bytes", "said"),
    [
        pytest.param(
            TEXT,
            7,
            2**40,
            ", but 7 x v100 make 7 stages or more, and the model has 5 layers: use fewer devices, or a "
            "trainer.batch_size that more replicas divide.",
            id="layers",
        ),
        pytest.param(
            (*SMALL, "trainer.batch_size=2", "launch.num_replicas=2"),
            2,
            2**40,
            ", with launch.num_replicas=2, but the 2 images of a planned mini-batch leave batch norm fewer than 2 at "
            "once: raise trainer.batch_size, or leave launch.num_replicas and pipeline.num_microbatches to the "
            "planner.",
            id="batch norm",
        ),
        pytest.param(
            (*TEXT, "trainer.evaluation.batch_size=100000", "pipeline.num_microbatches=1"),
            1,
            2**30,
            ", with pipeline.num_microbatches=1, but no evaluation fits 1 x v100 with 1 GiB each: lower "
            "trainer.evaluation.batch_size, or use more devices.",
            id="evaluation",
        ),
        pytest.param(
            (*TEXT, "pipeline.partitions=[2,3]"),
            2,
            1024,
            ", with pipeline.partitions=[2, 3], but nothing fits 2 x v100 with 9.54e-07 GiB each: use more devices, or "
            "lower trainer.batch_size.",
            id="memory",
        ),
    ],
)
def test_a_refusal_says_what_no_setting_meets(words: tuple[str, ...], count: int, room_bytes: int, said: str) -> None:
    composed = compose("train", overrides=list(words))
    found = find_refusal(lambda: choose_pipeline(composed, words, lambda *_: devices(count, room_bytes)))
    assert found == f"pipeline is auto{said}"


def test_what_is_no_matter_of_memory_is_said_as_without_a_search() -> None:
    composed = compose("train", overrides=[*TEXT, "pipeline.partitions=[3,3]"])
    with pytest.raises(
        ValueError, match=r"^pipeline.partitions is \[3, 3\], expected numbers whose sum is the model's 5"
    ):
        choose_pipeline(composed, (), lambda *_: devices(2))


@pytest.mark.parametrize(
    ("named", "environment", "count", "room_gib"),
    [
        (None, {}, 8, 3.6),
        (1, {}, 1, 14.4),
        (2, {}, 2, 14.4),
        (16, {}, 16, 1.8),
        (None, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 8, 3.6),
        (None, {"WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}, 32, 3.6),
    ],
)
def test_the_processes_of_a_host_share_its_memory(
    named: int | None, environment: dict[str, str], count: int, room_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 GiB and 8 cores; a process has at most 14.4 GiB, of the 16 that a processor is planned with."""
    patch_host(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = find_devices_at_hand(to_run(compose("train", overrides=SMALL[:-1])), named)
    assert (found.count, round(found.room_bytes / 2**30, 2)) == (count, room_gib)


def test_fit_on_the_command_line_fits_the_room_that_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 16 processes share the memory of a host, which has not enough for every graph."""
    patch_host(monkeypatch, 16 * 7 * 2**20)
    words = [*SMALL, "pipeline.schedule=gpipe", "pipeline.num_microbatches=4", "trainer.evaluation.every_epochs=null"]
    words += ["launch.num_processes=16", "launch.num_replicas=16", "trainer.batch_size=512", "launch.device=cpu"]
    words += ["trainer.dry_run=true"]
    fit = [*words, "pipeline.rematerialize=fit"]
    found = [to_run(choose_pipeline(compose("train", overrides=each), each)) for each in (words, fit)]
    assert found[0].pipeline.rematerialize.value == "fit" and found[1] == found[0]


def test_a_group_that_is_chosen_replaces_what_the_experiment_says() -> None:
    small = "model.num_layers=3", "model.num_filters=8", "data.image_size=32", "trainer.batch_size=16"
    composed = compose("train", overrides=["+experiment=amoebanet_imagenet_laptop", *small, "pipeline=auto"])
    assert is_open(composed)
    run = to_run(choose_pipeline(composed, [], lambda *_: devices(2)))
    assert run.launch.num_processes == 2


def test_a_run_says_what_was_chosen_and_trains(tmp_path: Path) -> None:
    words = ["pipeline.schedule=zb_h1", "launch.num_replicas=1", "trainer.max_steps=2", "launch.num_processes=2"]
    done = run_program(ROOT / "train.py", *SMALL, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob(f"runs/train/*/{RECORD_FILE}")
    (record,) = read_records(path)
    assert record.config["pipeline"]["num_stages"] == 2 and record.config["pipeline"]["schedule"] == "zb_h1"
    assert "pipeline=auto" not in record.command and "pipeline.num_stages=2" in record.command
    again = run_program(ROOT / "train.py", *record.command.split()[2:], "trainer.dry_run=true", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "K=2 stages" in again.stdout


@pytest.mark.parametrize(("choice", "words"), [("gpipe", ["pipeline=auto"]), ("auto", []), ("auto", ["pipeline=auto"])])
def test_what_is_said_of_a_run_composes_to_it_whatever_the_experiment_sets(
    choice: str, words: list[str], tmp_path: Path
) -> None:
    experiment = tmp_path / "experiment" / "mine.yaml"
    experiment.parent.mkdir()
    experiment.write_text(
        "# @package _global_\n"
        f"defaults:\n  - override /pipeline: {choice}\n  - _self_\n"
        f"pipeline: {{{'num_stages: 2, ' if choice == 'gpipe' else ''}partition_by: flops, partitions: [4, 5], "
        "synchronize_batch_norm: true}\n"
    )
    words = [f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine", *SMALL[:-1], *words]
    composed = compose("train", overrides=words)
    run = to_run(choose_pipeline(composed, words, lambda *_: devices(2)))
    said = spell_out(composed, run, words)
    assert "pipeline=auto" not in said
    assert to_run(compose("train", overrides=said)) == run


def test_words_without_auto_stay_as_they_are() -> None:
    composed = compose("train", overrides=[])
    assert not is_open(composed)
    assert spell_out(composed, to_run(composed), ["seed=3"]) == ["seed=3"]
