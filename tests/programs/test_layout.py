"""Settings become a plan, and a cut that all processes share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hydra import compose
from torch import Tensor, nn

from gpipe.config import ConfigError, PartitionBy, RunConfig, to_run
from gpipe.config.pipeline import Objective, PipelineSchedule, RematerializeChoice
from gpipe.pipeline.layers import compilation
from gpipe.planning.accelerator import find_accelerator
from gpipe.planning.calibration import Calibration
from gpipe.planning.step import Plan
from gpipe.programs.build import build_layers, build_pipeline
from gpipe.programs.layout import accelerator_at_hand, build_planner, build_setting, measure_seconds, share_layout
from gpipe.programs.workloads import workload_of
from gpipe.training.numerics import set_numerics
from tests.programs.small_runs import ALONE, LANGUAGE_MODEL, SMALL, TRANSLATION, run_of

pytestmark = pytest.mark.usefixtures("composer")


def plan_of(run: RunConfig) -> Plan:
    accelerator = accelerator_at_hand(run)
    return build_planner(run, accelerator).plan(build_setting(run, accelerator))


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


def test_a_calibration_has_what_the_engine_adds_to_tasks() -> None:
    """In one process tasks come one after the other, so each of them makes the step longer by as much."""
    run, cpu = run_of(), find_accelerator("cpu")
    setting = build_setting(run, cpu, ALONE)
    _, seconds, _ = build_planner(run, cpu).describe(setting)
    steps = []
    for task_seconds in (0.0, 1.0):
        planner = build_planner(run, cpu, calibration=Calibration({}, 4, seconds, seconds, task_seconds))
        steps.append(planner.plan(setting).step_seconds)
    num_tasks = sum(len(tasks) for tasks in planner.describe(setting)[2].tasks)
    assert num_tasks > 0
    assert steps[1] - steps[0] == pytest.approx(num_tasks)


def test_measured_seconds_cut_the_layers_too_and_are_planned_with() -> None:
    run = run_of("pipeline.partition_by=measured_seconds", "trainer.autocast=bfloat16")
    layers = build_layers(run)
    layout = share_layout(run, layers, ALONE)
    assert layout.planned is not None
    planner, plan = layout.planned
    assert sum(layout.partitions) == len(layers)
    assert all(parameter.is_meta for parameter in layers.parameters())
    assert planner.seconds is not None
    seconds = planner.seconds([])
    busy = sum(stage.work.forward for stage in plan.stages)
    assert busy == pytest.approx(sum(layer.forward for layer in seconds)) and busy > 0


@pytest.mark.parametrize(("deterministic", "precision"), [("true", "highest"), ("false", "high")])
def test_seconds_are_measured_with_the_kernels_of_the_run(deterministic: str, precision: str) -> None:
    kernels = (f"trainer.deterministic={deterministic}", f"trainer.float32_matmul_precision={precision}")
    run = run_of(*kernels, "model.num_layers=3")
    set_numerics(deterministic=deterministic == "false", float32_matmul_precision="medium")
    found = []

    def note(_: object) -> None:
        found.append((torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()))

    layers = build_layers(run)
    measure_seconds(run, layers, "cpu", note, splits=False)
    assert found == [(deterministic == "true", precision)] * len(layers)


@pytest.mark.parametrize("channels_last", [True, False])
def test_seconds_are_measured_in_the_memory_format_of_the_run(
    channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, forward = set(), nn.Conv2d.forward

    def note(convolution: nn.Conv2d, images: Tensor) -> Tensor:
        is_last = convolution.weight.is_contiguous(memory_format=torch.channels_last)
        if is_last != convolution.weight.is_contiguous():  # of a single channel or place both are true
            found.add(is_last)
        return forward(convolution, images)

    monkeypatch.setattr(nn.Conv2d, "forward", note)
    run = run_of(f"trainer.channels_last={channels_last}", "model.num_layers=3")
    measure_seconds(run, build_layers(run), "cpu", lambda _: None, splits=False)
    assert found == {channels_last}


@pytest.mark.parametrize("compiles", [True, False])
def test_layers_are_measured_compiled_where_the_run_compiles_them(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def note(_: int, options: Any) -> Callable[[nn.Module, Any], Any]:
        found.append(options)
        return lambda layer, value: layer(value)

    monkeypatch.setattr(compilation, "_compile", note)
    run = run_of(f"trainer.compile={compiles}", "model.num_layers=3")
    layers = build_layers(run)
    measure_seconds(run, layers, "cpu", lambda _: None, splits=False)
    assert found == [{"dynamic": False}] * (len(layers) if compiles else 0)


def test_measured_memory_knows_what_convolutions_take_inside_of_themselves() -> None:
    trains = "trainer.evaluation.every_epochs=null"
    run, plain = (run_of(f"pipeline.partition_by={by}", trains) for by in ("measured_memory", "memory"))
    layouts = [share_layout(each, build_layers(each), ALONE) for each in (run, plain)]
    plans = [layout.planned[1] for layout in layouts if layout.planned is not None]
    measured, planned = (max(memory.peak_bytes for memory in plan.memory) for plan in plans)
    assert measured > planned


def test_memory_is_measured_of_processors_alone() -> None:
    run = run_of("pipeline.partition_by=measured_memory")
    said = r"pipeline\.partition_by is measured_memory, but stages are on cuda, .*: set pipeline\.partition_by=memory"
    with pytest.raises(ConfigError, match=said):
        share_layout(run, build_layers(run), replace(ALONE, device_type="cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("cut", PartitionBy)
@pytest.mark.parametrize("model", [SMALL, LANGUAGE_MODEL, TRANSLATION], ids=["images", "tokens", "translation"])
def test_every_model_can_be_cut_by_every_cost_for_every_objective(model: tuple[str, ...], cut: PartitionBy) -> None:
    cuts = [f"pipeline.partition_by={cut.value}", "pipeline.num_stages=2"]
    composed = to_run(compose("train", overrides=[*model, *cuts]))
    layers = build_layers(composed)
    for objective in Objective:
        run = replace(composed, pipeline=replace(composed.pipeline, objective=objective))
        assert sum(share_layout(run, layers, ALONE).partitions) == len(layers)


@pytest.mark.slow
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
        (["pipeline.num_stages=10"], "pipeline.num_stages is 10, but the model has 9 layers: set it to 9 or less."),
        (
            ["pipeline.partitions=[3,3]"],
            r"^pipeline\.partitions is \[3, 3\], expected numbers whose sum is the model's 9 layers: correct them, or",
        ),
        (["pipeline.memory_limit_bytes=100"], r"pipeline\.memory_limit_bytes is 100, but the fullest device of the"),
        (["pipeline.partition_by=measured_seconds"], r"a plan measures nothing: set pipeline\.partition_by=seconds"),
        (["pipeline.partition_by=measured_memory"], r"a plan measures nothing: set pipeline\.partition_by=memory"),
    ],
)
def test_a_cut_that_is_impossible_is_refused(overrides: list[str], said: str) -> None:
    run = run_of(*overrides)
    with pytest.raises(ValueError, match=said):
        plan_of(run)


def test_batch_norm_is_not_synchronised_in_a_model_that_has_none() -> None:
    of_timm = "model=timm", "data=digits", "data.image_size=32", "pipeline.synchronize_batch_norm=true"
    plan_of(to_run(compose("train", overrides=[*of_timm, "model.name=test_resnet"])))
    of_text = *LANGUAGE_MODEL, "pipeline.synchronize_batch_norm=true"
    for words in ((*of_timm, "model.name=test_vit"), of_text):
        with pytest.raises(
            ConfigError, match=r"^pipeline\.synchronize_batch_norm is true, expected false with this model, "
        ):
            plan_of(to_run(compose("train", overrides=list(words))))


def test_a_mixed_run_is_planned_as_it_trains() -> None:
    run = run_of("data.mixup=0.8")
    targets = workload_of(run).targets(4)
    assert (targets.shape, targets.dtype, targets.device.type) == ((4, 10), torch.float32, "meta")
    measured = run_of("data.mixup=0.8", "pipeline.partition_by=measured_seconds", "model.num_layers=3")
    assert sum(share_layout(measured, build_layers(measured), ALONE).partitions) == len(build_layers(measured))
    assert plan_of(run).partitions == plan_of(run_of()).partitions
