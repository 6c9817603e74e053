"""A number that is not finite: everyone sees it before the update, its origin is named, or its mini-batch left out."""

import functools
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe.checkpoint.folder import find_best, find_latest
from gpipe.checkpoint.saver import Saver
from gpipe.checkpoint.writer import Snapshot
from gpipe.pipeline.job.errors import NonFiniteError
from gpipe.pipeline.randomness import derive_seed
from gpipe.pipeline.stage import MASKS
from gpipe.pipeline.step_end.gradient_scaler import GradientScaler
from gpipe.training.evaluation import EvaluationMetrics
from gpipe.training.optimizers import set_learning_rate
from gpipe.training.tracking import METRICS_FILE, Tracker
from gpipe.training.trainer import Trainer
from tests.support.process_pool import ProcessPool
from tests.training.conftest import Undisturbed
from tests.training.small_run import RandomImages, small_run, small_trainer
from tests.training.test_trainer import assert_same_state, poison, state_of


class Fault(nn.Module):
    """A layer as it was, but for the second micro-batch of the second step, which the seed of its masks tells."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.layer, self.seed = layer, derive_seed(MASKS, 0, 1, 1, index)

    def forward(self, inputs: Tensor) -> Tensor:
        is_it = torch.default_generator.initial_seed() == self.seed
        output: Tensor = self.layer(inputs)
        return output * math.nan if is_it else output


def spoil_gradients(trainer: Trainer, step: int) -> None:
    """Make the gradient of the last layer's weight infinite in one step."""
    weight = trainer.pipeline.layers["5"].weight
    weight.register_hook(lambda gradient: gradient * (math.inf if trainer.pipeline.step == step else 1.0))


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_mini_batch_leaves_everything_as_if_its_update_had_not_been(
    tmp_path: Path, what: str, clip: float | None
) -> None:
    trainer = small_trainer(tmp_path, max_gradient_norm=clip, non_finite="skip", max_skipped_steps=1, num_epochs=1)
    if what == "loss":
        poison(trainer, math.inf)
    else:
        spoil_gradients(trainer, 1)
    summary = trainer.train()
    assert (summary.num_steps, summary.num_skipped_steps) == (4, 1)

    oracle, num_updates = small_run(), 0
    for step, batch in enumerate(RandomImages()):
        set_learning_rate(oracle.optimizer, trainer.learning_rate(step))
        oracle.optimizer.zero_grad(set_to_none=True)
        if step == 1:
            oracle.pipeline.step += 1
            continue
        oracle.pipeline.train_step(batch)
        if clip is not None:
            oracle.pipeline.clip_gradients(clip)
        oracle.optimizer.step()
        num_updates += 1
        oracle.ema.update(num_updates)
    found, expected = state_of(trainer), oracle.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert lines[1]["num_skipped_steps"] == 1 and "loss" not in lines[1]


def test_the_number_of_skipped_steps_survives_a_resume_and_is_limited(tmp_path: Path) -> None:
    skipping = {"non_finite": "skip", "max_skipped_steps": 2}
    trainer = small_trainer(tmp_path, max_steps=3, **skipping)
    spoil_gradients(trainer, 2)
    assert trainer.train().num_skipped_steps == 1
    resumed = small_trainer(tmp_path, **skipping)
    resumed.resume()
    for step in (4, 6):
        spoil_gradients(resumed, step)
    with pytest.raises(NonFiniteError, match=r"gradient of layers\.5\.weight in step 6 .*; 2 steps were skipped befor"):
        resumed.train()


def half(folder: Path, scaler: GradientScaler, **settings: Any) -> Trainer:
    autocast = functools.partial(torch.autocast, "cpu", torch.float16)
    return small_trainer(folder, autocast=autocast, scaler=scaler, **settings)


def test_a_step_that_overflows_float16_updates_nothing_and_a_resumed_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    whole = half(tmp_path / "whole", GradientScaler(2.0**10, growth_interval=3))
    spoil_gradients(whole, 1)
    summary = whole.train()
    assert (summary.num_steps, summary.num_skipped_steps) == (12, 0)
    lines = [json.loads(line) for line in (tmp_path / "whole" / METRICS_FILE).read_text().splitlines()]
    scales = {line["step"]: line["loss_scale"] for line in lines if "loss_scale" in line}
    assert scales == dict(
        zip(range(1, 13), (2.0**k for k in (10, 9, 9, 9, 10, 10, 10, 11, 11, 11, 12, 12)), strict=True)
    )
    assert ["loss" in line for line in lines if "loss_scale" in line] == [True, False, *[True] * 10]

    part = half(tmp_path / "part", GradientScaler(2.0**10, growth_interval=3), max_steps=3)
    spoil_gradients(part, 1)
    part.train()
    resumed = half(tmp_path / "part", GradientScaler(2.0**10, growth_interval=3))
    assert resumed.resume()
    assert resumed.scaler is not None and resumed.scaler.scale == 2.0**9
    resumed.train()
    assert_same_state(whole, resumed)


def test_initial_weights_have_no_part_in_the_average_after_steps_that_overflow(tmp_path: Path) -> None:
    trainer = half(tmp_path, GradientScaler(2.0**10), max_steps=2)
    spoil_gradients(trainer, 0)
    trainer.train()
    assert trainer.ema is not None
    for name, parameter in trainer.pipeline.named_parameters():
        assert torch.equal(trainer.ema.state()[name], parameter), name


def test_float16_that_overflows_at_any_scale_ends_the_training(tmp_path: Path) -> None:
    trainer = half(tmp_path, GradientScaler(2.0))
    weight = trainer.pipeline.layers["5"].weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=r"gradients overflow float16 at a loss scale of 0\.5"):
        trainer.train()


def test_a_run_goes_on_at_a_scale_below_1_at_which_gradients_are_finite(tmp_path: Path) -> None:
    stopped = half(tmp_path, GradientScaler(1.0))
    spoil_gradients(stopped, 2)
    with pytest.raises(NonFiniteError, match=r"at a loss scale of 0\.5"):
        stopped.train()
    resumed = half(tmp_path, GradientScaler(1.0), max_steps=4)
    assert resumed.resume() and resumed.scaler is not None
    assert (resumed.pipeline.step, resumed.scaler.scale, resumed.scaler.num_skipped) == (2, 0.5, 0)
    assert resumed.train().num_steps == 4 == resumed._epoch * 4 + resumed._batch


def test_an_overflow_at_a_scale_below_1_is_skipped_and_counted_once(tmp_path: Path) -> None:
    trainer = half(tmp_path, GradientScaler(1.0), max_steps=2, non_finite="skip", max_skipped_steps=1)
    spoil_gradients(trainer, 0)
    summary = trainer.train()
    assert (summary.num_steps, summary.num_skipped_steps, trainer._batch) == (2, 1, 2)
    assert trainer.ema is not None  # of one update: initial weights have no part in it
    for name, parameter in trainer.pipeline.named_parameters():
        assert torch.equal(trainer.ema.state()[name], parameter), name


def test_a_stop_saves_the_state_before_and_goes_there_again(tmp_path: Path) -> None:
    oracle = small_trainer(tmp_path / "oracle", max_steps=6)
    oracle.train()
    trainer = small_trainer(tmp_path / "run")
    spoil_gradients(trainer, 6)
    with pytest.raises(
        NonFiniteError, match=r"in step 6 has the norm inf: all outputs of its layers and the loss are finite; the"
    ):
        trainer.train()
    trainer.tracker.close()
    path = find_latest(tmp_path / "run" / "checkpoints")
    assert path is not None and path.name == "step-00000006"
    resumed = small_trainer(tmp_path / "run")
    resumed.resume()
    assert_same_state(oracle, resumed)


def first_fault(
    folder: Path, layer: int, partitions: tuple[int, ...] = (2, 2, 2), **settings: object
) -> tuple[str, int | None]:
    """Break a layer for one micro-batch of the second step; return the message and the stage."""
    trainer = small_trainer(folder, partitions, **settings)
    for stage in trainer.pipeline.stages.values():
        if layer in stage.layers:
            broken = stage.layers[layer] = trainer.pipeline._own[layer] = Fault(stage.layers[layer], layer)
            trainer.pipeline.layers[str(layer)] = broken
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    trainer.pipeline.close()
    return str(error.value), error.value.stage


def first_fault_in_processes(rank: int, folder: Path, num_replicas: int, layer: int) -> tuple[str, int | None]:
    mesh = init_device_mesh("cpu", (num_replicas, 2), mesh_dim_names=("replica", "stage"))
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    return first_fault(folder, layer, (2, 4), mesh=mesh, tracker=tracker)


@pytest.mark.parametrize(("layer", "stage", "name"), [(0, 0, "Fault"), (2, 1, "Fault"), (3, 1, "Fault")])
def test_the_first_layer_whose_output_is_not_finite_is_named(tmp_path: Path, layer: int, stage: int, name: str) -> None:
    message, found = first_fault(tmp_path, layer)
    assert message.startswith("the loss of step 1 is nan in stage 2: the first is ")
    assert f"the first is layer {layer} (Fault) in stage {stage}, micro-batch 1 of replica 0; " in message
    assert found == stage


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_process_names_the_same_layer(tmp_path: Path, processes: ProcessPool, num_replicas: int) -> None:
    alone, _ = first_fault(tmp_path / "alone", 3, (2, 4))
    found = processes.run(2 * num_replicas, first_fault_in_processes, tmp_path / "many", num_replicas, 3)
    assert set(found) == {(alone, 1)}


def test_a_loss_of_finite_outputs_is_named_itself(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    trainer.pipeline._loss = lambda outputs, targets: outputs.sum() * math.nan
    with pytest.raises(NonFiniteError, match=r"the first is the loss in stage 1, micro-batch 0 of replica 0"):
        trainer.train()


def spoil_one_stage(rank: int, folder: Path) -> tuple[str, bool]:
    """Spoil a gradient in the first of three stages, without clipping; return the message, and if all is as before."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    tracker = Tracker(folder, enabled=rank == 0, mode="disabled")
    trainer = small_trainer(folder, (2, 2, 2), mesh=mesh, tracker=tracker, max_gradient_norm=None)
    if rank == 0:
        weight = trainer.pipeline.layers["0"][0].weight
        weight.register_hook(lambda gradient: gradient * math.nan)
    before = state_of(trainer)
    with pytest.raises(NonFiniteError) as error:
        trainer.train()
    trainer.pipeline.close()
    after = state_of(trainer)
    return str(error.value), all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_gradient_of_one_stage_stops_all_before_the_update(tmp_path: Path, processes: ProcessPool) -> None:
    for message, is_untouched in processes.run(3, spoil_one_stage, tmp_path):
        assert message.startswith("the gradient of layers.0.0.weight in step 0 has the norm nan: all outputs of its")
        assert is_untouched


def test_an_evaluation_behind_a_skipped_step_leaves_the_save_under_way_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_trainer(tmp_path / "oracle", max_steps=1, evaluate_every_epochs=None).train()
    settings = {"statistics_loader": RandomImages(), "num_statistics_batches": 1, "save_every_steps": 1}
    trainer = small_trainer(tmp_path, max_steps=2, non_finite="skip", max_skipped_steps=1, **settings)
    poison(trainer, math.nan)
    is_awaited, copy, wait = threading.Event(), Snapshot.copy, Saver.wait_until_copied
    log = trainer.tracker.log

    def note_wait(saver: Saver) -> None:
        if saver.status() is not None:
            is_awaited.set()
        wait(saver)

    def note_evaluation(values: dict[str, Any]) -> None:
        if "test/loss" in values:  # too late: it has changed the averages' batch norms
            is_awaited.set()
        log(values)

    trainer.tracker.log = note_evaluation
    monkeypatch.setattr(Snapshot, "copy", lambda snapshot: (is_awaited.wait(), copy(snapshot)))
    monkeypatch.setattr(Saver, "wait_until_copied", note_wait)
    trainer.train()
    name = "checkpoints/step-00000001/ema-0.safetensors"
    found, expected = (load_file(folder / name) for folder in (tmp_path, tmp_path / "oracle"))
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def test_the_state_that_is_saved_right_after_the_best_evaluation_is_the_best(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, evaluate_every_steps=1)
    poison(trainer, math.nan)
    with pytest.raises(NonFiniteError, match="the state before that step is saved"):
        trainer.train()
    assert find_best(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000001"


class SpoiledMetrics(EvaluationMetrics):
    """Finds no finite loss in one of its evaluations: the first is of the averages, the second of the weights."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def compute(self, sums: Tensor) -> dict[str, float]:
        self.count += 1
        return super().compute(sums) | ({"loss": math.inf} if self.count == self.number else {})


@pytest.mark.parametrize(("number", "name"), [(1, "loss"), (2, "raw_loss")])
def test_the_state_is_saved_whose_evaluation_has_no_finite_loss_and_a_run_goes_on_from_it(
    tmp_path: Path, whole: Undisturbed, number: int, name: str
) -> None:
    spoiled = small_trainer(tmp_path, metrics=SpoiledMetrics(number))
    with pytest.raises(ValueError, match=rf"^the {name} on test after step 4 is inf \(the state is saved\): lower the"):
        spoiled.train()
    assert find_latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000004"
    resumed = small_trainer(tmp_path)
    assert resumed.resume()
    resumed.train()
    assert_same_state(whole.trainer, resumed)


def test_a_last_evaluation_without_a_finite_loss_is_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        spoiled = small_trainer(tmp_path, max_steps=3, metrics=SpoiledMetrics(1))
        spoiled.resume()
        with pytest.raises(ValueError, match="after step 3 is inf"):
            spoiled.train()
    resumed = small_trainer(tmp_path, max_steps=3)
    assert resumed.resume()
    assert resumed.train().evaluation == small_trainer(tmp_path / "whole", max_steps=3).train().evaluation
