"""The training loop: its parts come in their order, and a resumed run equals one that never stopped."""

import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.folder import find_best, find_checkpoint, find_latest
from gpipe.pipeline.job.errors import NonFiniteError, PipelineError
from gpipe.training.evaluation import EvaluationMetrics, evaluate
from gpipe.training.learning_rate import constant
from gpipe.training.loader import number_batches
from gpipe.training.optimizers import set_learning_rate
from gpipe.training.progress import Progress
from gpipe.training.summary import StepSpeed, Totals
from gpipe.training.tracking import METRICS_FILE
from gpipe.training.trainer import Trainer
from tests.training.conftest import Undisturbed
from tests.training.small_run import RandomImages, SmallRun, small_run, small_trainer

TIMES = {"examples_per_second", "step_seconds", "peak_memory_bytes", "bubble"}


class Stop(Exception):
    """The machine fails."""


def stop_at(trainer: Trainer, step: int) -> None:
    """Make the trainer fail when it begins the step after `step` finished ones."""
    schedule = trainer.learning_rate

    def rate(finished: int) -> float:
        if finished == step:
            raise Stop
        return schedule(finished)

    trainer.learning_rate = rate


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copy every number of the training state."""
    assert trainer.ema is not None
    return SmallRun(trainer.pipeline, trainer.optimizer, trainer.ema).tensors()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read the log without what depends on the clock."""
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def assert_same_state(one: Trainer, other: Trainer) -> None:
    """Compare bit by bit."""
    expected = state_of(one)
    for name, tensor in state_of(other).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("stop", "saved"), [(6, 5), (7, 5), (8, 8), (11, 10)])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, whole: Undisturbed, stop: int, saved: int) -> None:
    every = 4 if saved == 8 else 5
    stopped = small_trainer(tmp_path / "run", save_every_steps=every)
    stop_at(stopped, stop)
    with pytest.raises(Stop):
        stopped.train()
    stopped.tracker.close()

    # With another partitioning: nothing of the run depends on it.
    resumed = small_trainer(tmp_path / "run", (1, 2, 3))
    torch.manual_seed(99)
    assert resumed.resume()
    assert resumed.pipeline.step == saved
    assert resumed.train().evaluation == whole.summary.evaluation
    assert_same_state(whole.trainer, resumed)
    assert read_log(tmp_path / "run") == read_log(whole.folder)


def test_a_second_trainer_of_a_trained_pipeline_does_not_end_silently(tmp_path: Path) -> None:
    first = small_trainer(tmp_path, checkpoint_folder=None)
    first.train()
    num_steps = first.pipeline.step
    first.train()  # nothing is left to train
    assert first.pipeline.step == num_steps
    second = replace(first)
    said = f"^pipeline.step is {num_steps}, but this trainer is at step 0 of {num_steps}: .* set pipeline.step = 0"
    with pytest.raises(ValueError, match=said):
        second.train()
    second.pipeline.step = 0
    before = state_of(second)
    second.train()
    assert second.pipeline.step == num_steps
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state_of(second).items())


def test_a_run_without_checkpoints_has_nothing_to_resume(tmp_path: Path) -> None:
    assert not small_trainer(tmp_path).resume()
    assert not small_trainer(tmp_path, checkpoint_folder=None).resume()


def test_the_end_is_saved_and_a_finished_run_only_tells_its_outcome(tmp_path: Path) -> None:
    first = small_trainer(tmp_path)
    summary = first.train()
    again = small_trainer(tmp_path)
    assert again.resume()
    told = again.train()
    assert (told.num_steps, told.top1, told.best_top1) == (12, summary.top1, summary.best_top1)
    assert again.train_loader.num_fetched == again.evaluation_loaders["test"].num_fetched == 0


def test_the_first_evaluation_set_stays_the_first_when_a_run_resumes(tmp_path: Path) -> None:
    sets = {"valid": RandomImages(15, 4, shuffle=False), "test": RandomImages(9, 4, shuffle=False)}
    summary = small_trainer(tmp_path, evaluation_loaders=sets).train()
    again = small_trainer(tmp_path, evaluation_loaders=sets)
    assert again.resume()
    told = again.train()
    assert list(told.evaluation) == list(summary.evaluation) == ["valid", "test"]
    assert told.top1 == summary.top1 == summary.evaluation["valid"]["top1"] != summary.evaluation["test"]["top1"]


def test_another_seed_or_batch_size_is_refused(tmp_path: Path) -> None:
    small_trainer(tmp_path, num_epochs=1).train()
    with pytest.raises(ValueError, match=r"saved with seed 0, not 3: resume with that seed"):
        small_trainer(tmp_path, seed=3).resume()
    with pytest.raises(ValueError, match=r"step 4, mini-batch 0 of epoch 1, but here an epoch has 3"):
        small_trainer(tmp_path, train_loader=RandomImages(batch_size=8)).resume()


def test_a_step_is_the_plain_loops(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, max_gradient_norm=0.5)
    trainer.train()
    oracle = small_run()
    for step in range(12):
        loader = RandomImages()
        loader.set_epoch(step // 4)
        batch = list(loader)[step % 4]
        set_learning_rate(oracle.optimizer, trainer.learning_rate(step))
        oracle.optimizer.zero_grad(set_to_none=True)
        oracle.pipeline.train_step(batch)
        oracle.pipeline.clip_gradients(0.5)
        oracle.optimizer.step()
        oracle.ema.update(step + 1)
    found, expected = state_of(trainer), oracle.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_it_learns(tmp_path: Path) -> None:
    evaluation = {"train": RandomImages(shuffle=False)}
    summary = small_trainer(
        tmp_path, num_epochs=30, learning_rate=constant(0.03), evaluation_loaders=evaluation, evaluate_every_epochs=10
    ).train()
    assert summary.top1 is not None and summary.top1 > 0.8
    assert summary.best_top1 is not None and summary.best_top1 >= summary.top1


def test_evaluation_uses_the_averages_counts_every_image_and_shows_the_model_itself_beside(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, num_epochs=1)
    summary = trainer.train()
    loader = RandomImages(15, 4, shuffle=False)
    assert trainer.ema is not None
    metrics, expected = EvaluationMetrics(), {}
    for prefix, layers in (("", trainer.ema.module), ("raw_", trainer.pipeline.layers.eval())):
        outputs = loader.images
        with torch.no_grad():
            for layer in layers.values():
                outputs = layer(outputs)
        figures = metrics.compute(metrics.measure(outputs, loader.labels))
        expected |= {prefix + name: figure for name, figure in figures.items()}
    assert summary.evaluation["test"] == pytest.approx(expected, rel=1e-5)
    assert evaluate(trainer.pipeline, loader) != summary.evaluation["test"]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [4, 8, 12]),
        ({"evaluate_every_epochs": 2}, [8, 12]),
        ({"evaluate_every_epochs": None}, []),
        ({"evaluate_every_epochs": None, "evaluate_every_steps": 5}, [5, 10, 12]),
        ({"evaluate_every_epochs": 2, "evaluate_every_steps": 3}, [3, 6, 8, 9, 12]),
        ({"max_steps": 6}, [4, 6]),
        ({"evaluation_loaders": {}}, []),
    ],
)
def test_it_evaluates_when_it_is_time_and_at_the_end(
    tmp_path: Path, settings: dict[str, Any], steps: list[int]
) -> None:
    trainer = small_trainer(tmp_path, **settings)
    summary = trainer.train()
    assert [line["step"] for line in read_log(tmp_path) if "test/top1" in line] == steps
    assert summary.num_steps == trainer.num_steps == settings.get("max_steps", 12)


def test_training_ends_when_evaluations_get_no_better(tmp_path: Path) -> None:
    class Losses:
        """Evaluations whose losses are given."""

        given = iter([3.0, 2.0, 2.5, 2.0, 1.0])

        def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, dtype=torch.float64)

        def compute(self, sums: torch.Tensor) -> dict[str, float]:
            return {"loss": next(self.given)}

    trainer = small_trainer(tmp_path, num_epochs=9, metrics=Losses(), patience=2, ema=None)
    summary = trainer.train()
    assert (summary.num_steps, summary.least_loss) == (16, {"loss": 2.0, "step": 8})
    assert next(Losses.given) == 1.0
    again = small_trainer(tmp_path, num_epochs=9, metrics=Losses(), patience=2, ema=None)
    assert again.resume() and again.train().num_steps == 16  # what has ended stays so
    Losses.given = iter([3.0, 3.0, 3.0])
    other = small_trainer(tmp_path / "other", num_epochs=9, metrics=Losses(), patience=2, ema=None)
    assert other.resume(find_latest(tmp_path / "checkpoints"))
    assert other.train().num_steps == 28  # another run has its own patience
    assert small_trainer(tmp_path / "patient", num_epochs=2, patience=2).train().num_steps == 8


def test_one_step_is_profiled_and_nothing_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "profile_0.json"
    trainer = small_trainer(tmp_path / "profiled", max_steps=3, profile_step=1, profile_file=file)
    plain = small_trainer(tmp_path / "plain", max_steps=3)
    assert trainer.train().evaluation == plain.train().evaluation
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"aten::convolution", "ConvolutionBackward0"} <= names


def test_a_training_that_never_evaluates_has_no_accuracy(tmp_path: Path) -> None:
    summary = small_trainer(tmp_path, evaluate_every_epochs=None).train()
    assert (summary.top1, summary.best_top1, summary.evaluation) == (None, None, {})


def test_the_first_steps_are_left_out_of_the_speed_unless_there_are_no_others() -> None:
    totals = Totals(speeds=[StepSpeed(8.0, 1.0, 4, 4), StepSpeed(2.0, 0.5, 4, 12), StepSpeed(1.0, 0.5, 4, 12)])
    summary = totals.summarize(3, 1, None, "sequences", 1)
    assert (summary.num_timed_steps, summary.step_seconds, summary.examples_per_second) == (2, 1.0, 3.0)
    assert (summary.examples, summary.tokens_per_second) == ("sequences", 9.0)
    summary = totals.summarize(3, 1, None, "sequences", 3)
    assert (summary.num_timed_steps, summary.step_seconds) == (3, 1.5)
    images = Totals(speeds=[StepSpeed(2.0, 0.0, 4, 4)]).summarize(1, 1, None, "images", 0)
    assert (images.examples_per_second, images.tokens_per_second) == (2.0, None)


def test_the_speed_is_that_of_all_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of another one may be fewer, with other numbers of tokens."""
    settings: dict[str, Any] = {"max_steps": 1, "evaluate_every_epochs": None, "keep_checkpoints": None}
    alone, together = (small_trainer(tmp_path / name, **settings) for name in ("alone", "together"))

    def join(values: list[Any]) -> list[Any]:
        for share, noted in filter(None, values):  # at the end of a step
            other = [({**note, "sizes": [3, 50]}, is_abandoned) for note, is_abandoned in noted]
            return [*values, (share, other)]
        return values

    monkeypatch.setattr(together.pipeline.job, "join_replicas", join)
    for trainer in (alone, together):
        trainer.train()
    one, both = alone._totals.speeds[-1], together._totals.speeds[-1]
    assert one.num_examples > 0 < one.num_targets
    assert (both.num_examples, both.num_targets) == (one.num_examples + 3, one.num_targets + 50)


def test_it_saves_every_so_many_steps_and_keeps_the_newest(tmp_path: Path) -> None:
    small_trainer(tmp_path, save_every_steps=5, keep_checkpoints=2, evaluation_loaders={}).train()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000010", "step-00000012"]
    assert find_latest(folder) == folder / "step-00000012"


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    losses = iter([3.0, 1.0, 2.0, 4.0])

    class Losses(EvaluationMetrics):
        def compute(self, sums: torch.Tensor) -> dict[str, float]:
            return super().compute(sums) | {"loss": next(losses)}

    settings = {"evaluate_every_epochs": None, "evaluate_every_steps": 3, "save_every_steps": 5}
    small_trainer(tmp_path, metrics=Losses(), keep_checkpoints=1, ema=None, **settings).train()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000006", "step-00000012"]
    assert find_best(folder) == folder / "step-00000006" == find_checkpoint(folder / "best")
    assert find_checkpoint(tmp_path) == find_checkpoint(folder) == folder / "step-00000012"


def test_the_drop_path_rate_rises_linearly_to_its_final_value(tmp_path: Path) -> None:
    rates: list[float] = []
    small_trainer(tmp_path, num_epochs=2, set_drop_path=rates.append, final_drop_path=0.7).train()
    assert rates == pytest.approx([0.1 * step for step in range(8)])


def test_the_log_has_every_step_with_its_settings(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    trainer.train()
    lines = [line for line in read_log(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    assert [line["learning_rate"] for line in lines] == [trainer.learning_rate(step) for step in range(12)]
    assert all({"top1", "top5", "gradient_norm"} <= line.keys() for line in lines)
    assert [line["wait_seconds"] for line in lines] == [0.25] * 12


@pytest.mark.parametrize(("training", "evaluation"), [(True, True), (True, False), (False, True)])
def test_autocast_reaches_the_layers_in_training_and_evaluation(
    tmp_path: Path, training: bool, evaluation: bool
) -> None:
    autocast, evaluation_autocast = (
        partial(torch.autocast, "cpu", torch.bfloat16, on) for on in (training, evaluation)
    )
    trainer = small_trainer(tmp_path, num_epochs=1, autocast=autocast, evaluation_autocast=evaluation_autocast)
    assert trainer.ema is not None
    seen: list[tuple[bool, torch.dtype]] = []
    for layers in (trainer.pipeline.layers, trainer.ema.module):
        layers["5"].register_forward_hook(lambda layer, _, output: seen.append((layer.training, output.dtype)))
    trainer.train()
    dtypes = {True: torch.bfloat16, False: torch.float32}
    assert set(seen) == {(True, dtypes[training]), (False, dtypes[evaluation])}
    assert all(parameter.dtype == torch.float32 for parameter in trainer.pipeline.parameters())


class Replacing(RandomImages):
    """A loader that puts others in the place of its second mini-batch's two broken images."""

    def __iter__(self) -> Any:
        self.num_replaced = 0
        for number, batch in zip(number_batches(self), super().__iter__(), strict=True):
            self.num_replaced += 2 * (number == 1)
            yield batch


def test_replaced_examples_are_counted_where_there_are_any(tmp_path: Path) -> None:
    loaders = {"train_loader": Replacing(), "evaluation_loaders": {"test": Replacing(15, 4, shuffle=False)}}
    summary = small_trainer(tmp_path, **loaders).train()
    log = read_log(tmp_path)
    assert [line["step"] for line in log if "replaced_examples" in line] == [2, 6, 10]
    assert [line["test/replaced_examples"] for line in log if "test/loss" in line] == [2, 2, 2]
    assert summary.num_replaced == 6


def test_the_summary_tells_what_it_cost(tmp_path: Path) -> None:
    summary = small_trainer(tmp_path).train()
    assert summary.wait_seconds == 3.0
    assert summary.examples_per_second is not None and summary.examples_per_second > 0
    assert summary.seconds > 0
    json.dumps(summary.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("every", "expected"), [(5, [3, 8, 12]), (2, [3, 5, 7, 9, 11, 12]), (1, [*range(3, 13)])])
def test_the_timeline_of_one_step_in_so_many_is_recorded(tmp_path: Path, every: int, expected: list[int]) -> None:
    timelines: list[Any] = []
    trainer = small_trainer(
        tmp_path,
        timeline_every_steps=every,
        num_untimed_steps=2,
        on_timeline=lambda timeline: timelines.append(trainer.pipeline.step),
    )
    summary = trainer.train()
    assert timelines == expected, "no untimed step, then one in so many, and the last"
    assert summary.bubble is None, "in one process the stages take turns: their idle time says nothing"


def test_progress_tells_of_steps_and_evaluations(tmp_path: Path) -> None:
    stream = io.StringIO()
    small_trainer(tmp_path, progress=Progress(12, 3, stream=stream, interval_seconds=1e9)).train()
    lines = stream.getvalue().splitlines()
    found = [line.split("  ") for line in lines[::2]]
    assert [(line[0], line[2]) for line in found] == [(f"step {4 * e}/12", f"epoch {e}/3") for e in (1, 2, 3)]
    assert lines[1].startswith("evaluation on test after step 4: loss ")


def poison(trainer: Trainer, value: float) -> None:
    """Make the loss of the second step infinite or undefined."""
    loader = trainer.train_loader
    assert isinstance(loader, RandomImages)
    loader.set_epoch(0)
    images, _ = list(loader)[1]
    index = (loader.images == images[0]).flatten(1).all(dim=1).nonzero()[0, 0]
    loader.images[index] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_and_nothing_is_updated(tmp_path: Path, value: float) -> None:
    trainer, oracle = small_trainer(tmp_path), small_trainer(tmp_path / "oracle", max_steps=1)
    oracle.train()
    poison(trainer, value)
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert_same_state(oracle, trainer)


def test_a_gradient_that_is_not_finite_ends_the_run_and_weights_are_not_updated(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    weight = trainer.pipeline.layers["5"].weight
    weight.register_hook(lambda gradient: gradient * math.inf)
    before = weight.detach().clone()
    with pytest.raises(PipelineError, match="step 0"):
        trainer.train()
    assert torch.equal(weight, before)


def test_what_cannot_be_saved_ends_the_training_before_its_first_step(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, config={"optimizer": {"clip_norm": math.inf}})
    with pytest.raises(CheckpointError, match=r"settings or results of step 0 cannot be saved \(Out of range"):
        trainer.train()
    assert trainer.pipeline.step == trainer.train_loader.num_fetched == 0
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_optimizer_that_cannot_be_saved_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    run = small_run((2, 4))
    nameless = torch.optim.SGD(run.pipeline.layers.parameters(), lr=0.1)
    given = {"pipeline": run.pipeline, "ema": run.ema, "optimizer": nameless}
    with pytest.raises(TypeError, match="does not know its parameters' names: build it from"):
        small_trainer(tmp_path, **given)
    small_trainer(tmp_path, **given, checkpoint_folder=None).train()


def test_only_the_pipeline_the_optimizer_and_the_data_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run((2, 4))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.007
    summary = Trainer(pipeline=run.pipeline, optimizer=run.optimizer, train_loader=RandomImages()).train()
    assert (summary.num_steps, summary.num_epochs, summary.evaluation) == (4, 1, {})
    assert {group["lr"] for group in run.optimizer.param_groups} == {0.007}
    assert "step 4/4" in capsys.readouterr().out


def test_a_folder_may_be_text(tmp_path: Path) -> None:
    trainer = replace(small_trainer(tmp_path), checkpoint_folder=str(tmp_path / "text"))
    trainer.train()
    assert find_latest(tmp_path / "text") is not None


def test_the_speeds_of_a_long_training_are_those_of_its_last_steps() -> None:
    totals = Totals()
    for number in range(30_000):
        totals.speeds.append(StepSpeed(number, 0.0, 1, 1))
    summary = totals.summarize(30_000, 1, None, "examples", 1)
    assert summary.num_timed_steps < 30_000 and summary.step_seconds is not None and summary.step_seconds > 20_000


class NestedTargets(RandomImages):
    """Targets as a nest, of which the first tensor has a number per example."""

    def __iter__(self) -> Any:
        for images, labels in super().__iter__():
            yield images, {"labels": labels, "again": labels}


def test_targets_may_be_nested(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, train_loader=NestedTargets(), evaluation_loaders={})
    trainer.pipeline._loss = lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets["again"])
    assert trainer.train().num_steps == 12


def test_a_run_that_resumes_from_another_has_a_best_checkpoint_of_its_own(tmp_path: Path) -> None:
    first = small_trainer(tmp_path / "first")
    first.train()
    first._totals.least_loss = {"loss": 0.0, "step": 1}  # a loss that the other run does not reach
    first._save()
    first._saver.wait()
    second = small_trainer(tmp_path / "second", num_epochs=first.num_epochs + 1)
    assert second.resume(find_latest(tmp_path / "first" / "checkpoints"))
    second.train()
    assert find_best(tmp_path / "second" / "checkpoints") is not None


def test_a_run_that_resumes_from_another_tells_of_its_own_evaluations_alone(tmp_path: Path) -> None:
    small_trainer(tmp_path / "first").train()
    silent = {"evaluate_every_epochs": None, "num_epochs": 4}
    second = small_trainer(tmp_path / "second", **silent)
    assert second.resume(find_latest(tmp_path / "first" / "checkpoints"))
    summary = second.train()
    assert (summary.num_steps, summary.evaluation, summary.least_loss) == (16, {}, {})
    assert (summary.top1, summary.best_top1) == (None, None)
    again = small_trainer(tmp_path / "second", **silent)
    assert again.resume() and again.train().evaluation == {}
