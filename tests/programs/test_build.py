"""Settings become the objects that they describe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose

from gpipe.config import ConfigError, PartitionBy, RunConfig, to_run
from gpipe.config.pipeline import Objective, PipelineSchedule, RematerializeChoice
from gpipe.launch.processes import Place
from gpipe.planning.accelerator import find_accelerator
from gpipe.planning.planner import Planner
from gpipe.planning.step import Plan
from gpipe.programs.build import build_layers, build_pipeline, build_tracker, build_trainer
from gpipe.programs.layout import accelerator_at_hand, build_planner, build_setting, share_layout
from gpipe.programs.workloads import workload_of
from gpipe.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("composer")
ALONE = Place(None, "cpu")
SMALL = ("model.num_filters=8", "data.image_size=32", "trainer.batch_size=16", "tracking=disabled")


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*SMALL, *overrides]))


def plan_of(run: RunConfig) -> Plan:
    accelerator = accelerator_at_hand(run)
    return build_planner(run, accelerator).plan(build_setting(run, accelerator))


def trainer_of(folder: Path, *overrides: str) -> Trainer:
    run = run_of(*overrides)
    layers = build_layers(run)
    pipeline = build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE)
    with build_tracker(run, folder, [], enabled=False) as tracker:
        return build_trainer(run, pipeline, ALONE, folder, tracker, lambda timeline: None)


def test_the_model_is_described_without_memory() -> None:
    layers = build_layers(run_of("+experiment=amoebanet_imagenet", "trainer.batch_size=1024"))
    assert all(parameter.is_meta for parameter in layers.parameters())


def test_the_plan_covers_every_layer_once() -> None:
    run = run_of("pipeline.num_stages=3")
    layers = build_layers(run)
    plan = plan_of(run)
    assert sum(plan.partitions) == len(layers)
    assert plan.stages[0].first_layer == 0
    assert plan.stages[-1].last_layer == len(layers) - 1
    assert sum(stage.parameters for stage in plan.stages) == sum(p.numel() for p in layers.parameters())


def test_transformer_48_is_planned_without_memory() -> None:
    run = to_run(compose("train", overrides=["model=transformer_lm", "data=random_tokens"]))
    plan = plan_of(run)
    assert sum(stage.parameters for stage in plan.stages) == 48 * 50_358_272 + 131_104_000  # paper.md, section 2
    assert plan.imbalance < 0.03


def test_given_partitions_are_taken_as_they_are() -> None:
    run = run_of("pipeline.partitions=[2,7]", "pipeline.partition_by=measured_seconds")
    assert plan_of(run).partitions == [2, 7]
    assert share_layout(run, build_layers(run), ALONE).partitions == [2, 7]


def test_measured_seconds_cut_the_layers_too_and_are_planned_with() -> None:
    run = run_of("pipeline.partition_by=measured_seconds", "trainer.autocast=bfloat16")
    layers = build_layers(run)
    layout = share_layout(run, layers, ALONE)
    planner = layout.planner
    assert sum(layout.partitions) == len(layers)
    assert all(parameter.is_meta for parameter in layers.parameters())
    assert isinstance(planner, Planner) and planner.seconds is not None
    seconds = planner.seconds([])
    plan = planner.plan(build_setting(run, planner.accelerator, ALONE))
    busy = sum(stage.forward_seconds for stage in plan.stages)
    assert busy == pytest.approx(sum(layer.forward for layer in seconds)) and busy > 0


def test_measured_memory_knows_what_convolutions_take_inside_of_themselves() -> None:
    run, plain = (run_of(f"pipeline.partition_by={by}") for by in ("measured_memory", "memory"))
    planners = [share_layout(each, build_layers(each), ALONE).planner for each in (run, plain)]
    plans = [
        planner.plan(build_setting(run, planner.accelerator, ALONE)) for planner in planners if planner is not None
    ]
    measured, planned = (max(memory.peak_bytes for memory in plan.memory) for plan in plans)
    assert measured > planned


def test_memory_is_measured_of_processors_alone() -> None:
    run = run_of("pipeline.partition_by=measured_memory")
    said = r"pipeline\.partition_by is measured_memory, but stages are on cuda, .*: set pipeline\.partition_by=memory"
    with pytest.raises(ConfigError, match=said):
        share_layout(run, build_layers(run), replace(ALONE, device_type="cuda"))


TOKENS = ("data=random_tokens", "data.vocabulary_size=40", "data.sequence_length=5")
LANGUAGE_MODEL = ("model=transformer_lm_small", "model.num_layers=2", *TOKENS, "trainer.batch_size=8")
TRANSLATION = ("+experiment=transformer_multilingual_laptop", "trainer.batch_size=8")


@pytest.mark.parametrize("cut", PartitionBy)
@pytest.mark.parametrize("model", [SMALL, LANGUAGE_MODEL, TRANSLATION], ids=["images", "tokens", "translation"])
def test_every_model_can_be_cut_by_every_cost_for_every_objective(model: tuple[str, ...], cut: PartitionBy) -> None:
    cuts = [f"pipeline.partition_by={cut.value}", "pipeline.num_stages=2"]
    composed = to_run(compose("train", overrides=[*model, *cuts]))
    layers = build_layers(composed)
    for objective in Objective:
        run = replace(composed, pipeline=replace(composed.pipeline, objective=objective))
        assert sum(share_layout(run, layers, ALONE).partitions) == len(layers)


@pytest.mark.parametrize("model", [SMALL, LANGUAGE_MODEL, TRANSLATION], ids=["images", "tokens", "translation"])
def test_every_model_can_be_planned_with_every_mode_and_schedule(model: tuple[str, ...]) -> None:
    for schedule in PipelineSchedule:
        shared = 2 if schedule.value in ("interleaved_1f1b", "zb_v") else 1
        overrides = [f"pipeline.schedule={schedule.value}", f"pipeline.stages_per_device={shared}"]
        shapes = ["pipeline.num_stages=4", "pipeline.num_microbatches=4", "launch=process_per_stage"]
        composed = to_run(compose("train", overrides=[*model, *overrides, *shapes]))
        for mode in RematerializeChoice:
            plan = plan_of(replace(composed, pipeline=replace(composed.pipeline, rematerialize=mode)))
            assert plan.bubble is not None and 0 < plan.bubble < 1 and len(plan.memory) == 4 // shared


def test_fit_keeps_the_graphs_that_the_limit_has_room_for() -> None:
    """With a limit between those of recomputing all and nothing, the pipeline gets numbers between them."""
    shape = ("pipeline.partitions=[5,4]", "pipeline.num_microbatches=8")
    always, never = (
        plan_of(run_of(*shape, f"pipeline.rematerialize={mode}")).peak_bytes for mode in ("always", "never")
    )
    limit = (always + never) // 2
    run = run_of(*shape, "pipeline.rematerialize=fit", f"pipeline.memory_limit_bytes={limit}")
    layers = build_layers(run)
    layout = share_layout(run, layers, ALONE)
    assert isinstance(layout.rematerialize, tuple) and any(0 < count < 8 for count in layout.rematerialize)
    assert plan_of(run).peak_bytes <= limit
    assert build_pipeline(run, layers, layout, ALONE).rematerialize == layout.rematerialize
    for too_much, mode in ((never, RematerializeChoice.never), (2**50, RematerializeChoice.never)):
        run = run_of(*shape, "pipeline.rematerialize=fit", f"pipeline.memory_limit_bytes={too_much}")
        assert share_layout(run, build_layers(run), ALONE).rematerialize == mode.value


def test_all_stages_in_one_process_have_no_bubble() -> None:
    assert plan_of(run_of()).bubble is None
    assert plan_of(run_of("launch=process_per_stage")).bubble is not None
    setting = build_setting(run_of("launch=process_per_stage"), find_accelerator("cpu"), ALONE)
    assert setting.is_sequential, "torchrun's number overrules"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["pipeline.num_stages=10"], "num_partitions is 10, but 9 layers can make from 1 to 9"),
        (["pipeline.partitions=[3,3]"], r"partitions is \[3, 3\], which covers 6 layers; give positive whole numbers"),
        (["pipeline.memory_limit_bytes=100"], r"pipeline\.memory_limit_bytes is 100, but the fullest device of the"),
        (["pipeline.partition_by=measured_seconds"], r"a plan measures nothing: set pipeline\.partition_by=seconds"),
        (["pipeline.partition_by=measured_memory"], r"a plan measures nothing: set pipeline\.partition_by=memory"),
    ],
)
def test_a_cut_that_is_impossible_is_refused(overrides: list[str], said: str) -> None:
    run = run_of(*overrides)
    with pytest.raises(ValueError, match=said):
        plan_of(run)


def test_the_peak_learning_rate_follows_the_batch_size(tmp_path: Path) -> None:
    overrides = ["optimizer=rmsprop", "schedule.name=constant", "schedule.warm_up_epochs=0"]
    trainer = trainer_of(tmp_path, *overrides, "trainer.batch_size=20")
    assert trainer.learning_rate(0) == pytest.approx(0.00125 * 20)
    assert trainer_of(tmp_path, *overrides, "optimizer.times_batch_size=false").learning_rate(0) == 0.00125


WARM_UP = ("schedule.warm_up_epochs=0", "schedule.warm_up_steps=100000", "trainer.num_epochs=1")


@pytest.mark.parametrize("curve", ["cosine", "exponential"])
def test_a_warm_up_that_max_steps_cuts_short_is_a_warning(
    curve: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, *WARM_UP, f"schedule.name={curve}", "trainer.max_steps=3")
    assert (
        "warning: schedule.warm_up_steps=100000 gives 100000 warm-up steps, but training has 3 (trainer.max_steps=3), "
        "so the learning rate only rises." in capsys.readouterr().out
    )
    rates = [trainer.learning_rate(step) for step in range(3)]
    assert rates == sorted(set(rates))


def test_a_cosine_whose_warm_up_is_longer_than_its_epochs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"gives 100000 warm-up steps, but training has \d+ \(trainer\.num_epochs=1\)"
    ):
        trainer_of(tmp_path, *WARM_UP, "schedule.name=cosine", "trainer.max_steps=null")
    with pytest.raises(ConfigError, match=r"schedule\.warm_up_epochs=1\.5 gives \d+ warm-up steps"):
        trainer_of(tmp_path, *WARM_UP[2:], "schedule.name=cosine", "schedule.warm_up_epochs=1.5")
    capsys.readouterr()
    trainer_of(tmp_path, *WARM_UP, "schedule.name=exponential")
    assert "(trainer.num_epochs=1), so the learning rate only rises." in capsys.readouterr().out


def test_a_warm_up_that_fits_is_no_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of(tmp_path, "schedule.warm_up_epochs=0", "schedule.warm_up_steps=3", "trainer.max_steps=3")
    assert "warm-up" not in capsys.readouterr().out


def test_settings_reach_the_optimiser_and_the_average(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, "optimizer=rmsprop", "optimizer.decay=0.8", "optimizer.clip_norm=2", "ema.decay=null"
    )
    assert {group["alpha"] for group in trainer.optimizer.param_groups} == {0.8}
    assert trainer.max_gradient_norm == 2
    assert trainer.ema is None


def test_autocast_and_the_memory_format_reach_the_layers(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "trainer.autocast=bfloat16", "trainer.channels_last=true")
    with trainer.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    kernels = [parameter for parameter in trainer.pipeline.parameters() if parameter.ndim == 4]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


@pytest.mark.parametrize(
    ("model", "tries"), [(SMALL, True), (LANGUAGE_MODEL, True), (TRANSLATION, False)], ids=["images", "tokens", "text"]
)
def test_cudnn_tries_kernels_where_shapes_stay_and_bits_may_differ(model: tuple[str, ...], tries: bool) -> None:
    for deterministic in (False, True):
        run = to_run(compose("train", overrides=[*model, f"trainer.deterministic={str(deterministic).lower()}"]))
        layers = build_layers(run)
        build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE).close()
        assert torch.backends.cudnn.benchmark is (tries and not deterministic)


def test_training_images_are_mixed_and_counted_and_test_images_are_left_alone(tmp_path: Path) -> None:
    overrides = ["data.mixup=0.8", "data.cutmix=1", "data.random_erasing=0.25"]
    trainer = trainer_of(tmp_path, *overrides)
    for loader in (trainer.train_loader, trainer.statistics_loader):
        images, targets = next(iter(loader))
        assert images.shape == (16, 1, 32, 32) and targets.shape == (16, 10) and targets.is_floating_point()
        assert trainer.count_targets(targets) == 16
    assert trainer.count_targets(torch.arange(16)) == 16
    test_images, labels = next(iter(trainer.evaluation_loaders["test"]))
    plain_images, plain_labels = next(iter(trainer_of(tmp_path).evaluation_loaders["test"]))
    assert torch.equal(test_images, plain_images) and torch.equal(labels, plain_labels)


def test_few_images_are_trained_on_and_the_validation_images_are_evaluated_first(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "data.max_images=50", "data.validation_images=20", "seed=3")
    counts = {name: sum(len(labels) for _, labels in found) for name, found in trainer.evaluation_loaders.items()}
    assert counts == {"valid": 20, "test": 1_000} and list(counts) == ["valid", "test"], "the first set's figures count"
    assert len(trainer.train_loader) == 3, "of 16 images each; two are left out"
    for other in ("seed=3", "seed=4"):
        again = trainer_of(tmp_path, "data.validation_images=20", other).evaluation_loaders["valid"]
        images, same = (next(iter(loader))[0] for loader in (trainer.evaluation_loaders["valid"], again))
        assert torch.equal(images, same) == (other == "seed=3")
    assert list(trainer_of(tmp_path).evaluation_loaders) == ["test"]


def test_more_images_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"but fashion_mnist_embedded has 6,000 training images: lower them"):
        trainer_of(tmp_path, "data.max_images=5990", "data.validation_images=20")


def test_a_mixed_run_is_planned_as_it_trains() -> None:
    run = run_of("data.mixup=0.8")
    targets = workload_of(run).targets(4)
    assert (targets.shape, targets.dtype, targets.device.type) == ((4, 10), torch.float32, "meta")
    measured = run_of("data.mixup=0.8", "pipeline.partition_by=measured_seconds", "model.num_layers=3")
    assert sum(share_layout(measured, build_layers(measured), ALONE).partitions) == len(build_layers(measured))
    assert plan_of(run).partitions == plan_of(run_of()).partitions


def test_a_number_of_classes_that_the_data_do_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.num_classes is 9, but fashion_mnist_embedded has 10"):
        trainer_of(tmp_path, "data.num_classes=9")


def test_a_transformers_settings_and_vocabulary_reach_its_layers_loss_and_loaders(tmp_path: Path) -> None:
    tokens = ("model=transformer_lm_small", "data=random_tokens", "data.vocabulary_size=40", "data.sequence_length=5")
    overrides = [*tokens, "model.num_layers=2", "trainer.batch_size=6", "trainer.checkpoints.keep=null"]
    run = to_run(compose("train", overrides=["tracking=disabled", *overrides]))
    layers = build_layers(run)
    assert len(layers) == 4 and all(parameter.is_meta for parameter in layers.parameters())
    assert (layers[0].num_embeddings, layers[-1].out_features) == (40, 40)
    pipeline = build_pipeline(run, layers, share_layout(run, layers, ALONE), ALONE)
    with build_tracker(run, tmp_path, [], enabled=False) as tracker:
        trainer = build_trainer(run, pipeline, ALONE, tmp_path, tracker, lambda timeline: None)
    inputs, targets = next(iter(trainer.train_loader))
    assert inputs is not None and inputs.shape == targets.shape == (6, 5)
    assert workload_of(run).loss_weight(targets) == 30
    assert (trainer.examples, trainer.set_drop_path, trainer.checkpoint_folder) == ("sequences", None, None)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which has no checkpoint"):
        trainer_of(tmp_path, f"trainer.resume_from={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "train"),
        (["+experiment=short_runs_laptop", "tracking=online", "launch.num_threads=1"], "train"),
        (["optimizer.learning_rate=0.1", "seed=2", "hydra.run.dir=x"], "learning_rate=0.1 seed=2"),
        (["init_from=" + 80 * "a"], "init_from=" + 51 * "a" + "..."),
    ],
)
def test_a_run_is_named_after_what_distinguishes_it(
    overrides: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("gpipe.programs.build.Tracker", lambda folder, **names: given.update(names))
    build_tracker(run_of(), tmp_path, overrides, enabled=True)
    assert (given["name"], given["group"]) == (name, "train")
    assert given["tags"] == ["amoebanet", "fashion_mnist_embedded", "K=2", "M=8"]
    assert given["config"]["command"].startswith("python train.py") and given["config"]["packages"]["torch"]
