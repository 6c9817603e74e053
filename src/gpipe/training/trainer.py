"""The training loop: what happens in a step, at the end of an epoch, and when a run goes on where it stopped."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Position
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.job.errors import NonFiniteError, PipelineError
from gpipe.pipeline.timeline import Timeline
from gpipe.training.checkpoints import Checkpoints
from gpipe.training.ema import Ema
from gpipe.training.evaluation import evaluate
from gpipe.training.learning_rate import Schedule
from gpipe.training.loader import Loader, loaded
from gpipe.training.metrics import EvaluationMetrics, Metrics
from gpipe.training.non_finite import explain
from gpipe.training.optimizers import set_learning_rate
from gpipe.training.progress import Progress, StepStatus
from gpipe.training.stop import Stopped
from gpipe.training.summary import StepSpeed, Summary, Totals
from gpipe.training.tracking import Tracker


@dataclass(kw_only=True)
class Trainer:
    """Train a pipeline; every process of it makes one of these and calls the same methods.

        for each mini-batch: learning rate, drop-path rate -> pipeline.train_step -> clip -> update -> average -> log
        at the end of an epoch: evaluate on the averages; every so many steps: save

    `learning_rate` and the drop-path rate, which rises linearly from 0 to `final_drop_path` at the last step, are
    functions of the number of finished steps. `max_steps` ends the training early and counts as its length.
    `max_gradient_norm` clips the norm over all stages. `autocast` makes the context in which layers train, such as
    `lambda: torch.autocast("cuda", torch.bfloat16)`, `evaluation_autocast` that in which they are evaluated.
    `evaluation_loaders` are by name; the first is the main one.
    `evaluate_every_epochs` and `evaluate_every_steps`, both None, never evaluate; else the end of training is evaluated
    too, with `metrics`. After `patience` evaluations in a row without a smaller loss of the main set training
    ends; None waits for its length.
    `examples` is what the data call them, `count_targets` says how many targets a mini-batch has, on the processes that
    are given them; the summary's speed leaves out the first `num_untimed_steps`.
    `checkpoint_folder` None saves nothing; else the end of training is saved. With `save_every_steps` also each so many
    are, and an evaluation whose loss is the least so far. The newest `keep_checkpoints` stay, and the best.
    `timeline_every_steps` records the timeline of one step in so many, and gives it to `on_timeline`.
    `asked_to_stop` says on any process why all are to stop, None while they are not; they do at the next step boundary.
    A loss or gradient that is not finite ends the training (`non_finite` "stop", see `explain`), or its mini-batch is
    left out ("skip"), up to `max_skipped_steps` times: a step that updates nothing.
    """

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    learning_rate: Schedule
    train_loader: Loader
    evaluation_loaders: Mapping[str, Loader]
    num_epochs: int
    tracker: Tracker
    progress: Progress
    seed: int
    max_steps: int | None = None
    ema: Ema | None = None
    max_gradient_norm: float | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    evaluation_autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    set_drop_path: Callable[[float], None] | None = None
    final_drop_path: float = 0.0
    examples: str = "examples"
    count_targets: Callable[[Any], float] = torch.numel
    num_untimed_steps: int = 1
    evaluate_every_epochs: int | None = 1
    evaluate_every_steps: int | None = None
    metrics: Metrics = field(default_factory=EvaluationMetrics)
    patience: int | None = None
    checkpoint_folder: Path | None = None
    save_every_steps: int | None = None
    keep_checkpoints: int = 3
    timeline_every_steps: int | None = None
    on_timeline: Callable[[Timeline], None] | None = None
    asked_to_stop: Callable[[], str | None] = lambda: None
    non_finite: str = "stop"
    max_skipped_steps: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        for name in (
            "num_epochs", "max_steps", "evaluate_every_epochs", "evaluate_every_steps", "save_every_steps",
            "keep_checkpoints", "timeline_every_steps", "patience",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but it must be at least 1.")
        if self.non_finite not in ("stop", "skip"):
            raise ValueError(f"non_finite is {self.non_finite!r}: choose stop or skip.")
        self._epoch = 0
        self._batch = 0
        self._totals = Totals()
        self._checkpoints = Checkpoints(
            self.checkpoint_folder,
            self.pipeline,
            self.optimizer,
            self.ema,
            keep=self.keep_checkpoints,
            config=self.config,
            say=self.progress.message,
        )

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole training."""
        steps = self.num_epochs * len(self.train_loader)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def _position(self) -> Position:
        return Position(self.pipeline.step, self._epoch, self._batch, self.seed)

    @property
    def _is_done(self) -> bool:
        is_out_of_patience = self.patience is not None and self._totals.num_worse >= self.patience
        return is_out_of_patience or self.pipeline.step >= self.num_steps

    @property
    def _evaluates(self) -> bool:
        return self.evaluate_every_epochs is not None or self.evaluate_every_steps is not None

    def resume(self, path: Path | None = None) -> bool:
        """Go on from a checkpoint, or from the newest good one in `checkpoint_folder`; False where there is none.

        The run then does, bit for bit, what it would have done had it never stopped. Raises CheckpointError for a
        damaged checkpoint that was named, ValueError where it was saved with another seed or number of mini-batches.
        """
        if path is not None:
            manifest = self._checkpoints.load(path)
        elif (found := self._checkpoints.load_newest()) is not None:
            path, manifest = found
        else:
            return False
        position = manifest.position
        if position.seed != self.seed:
            raise ValueError(f"{path} was saved with seed {position.seed}, not {self.seed}: resume with that seed.")
        if position.step != position.epoch * len(self.train_loader) + position.batch:
            raise ValueError(
                f"{path} stands at step {position.step} as mini-batch {position.batch} of epoch {position.epoch}, but "
                f"here an epoch has {len(self.train_loader)} mini-batches: resume with the same data and batch size."
            )
        self.pipeline.step, self._epoch, self._batch = position.step, position.epoch, position.batch
        self._totals = Totals.resumed(manifest.results)
        self.tracker.rewind(position.step)
        return True

    def start_from(self, path: Path, replaced: Collection[str]) -> None:
        """Begin with what another run evaluated: the averages of its checkpoint, or its weights where it has none.

        The tensors called `replaced` stay as they are.
        Raises CheckpointError where the checkpoint is damaged, or another model's.
        """
        self._checkpoints.load_weights(path, replaced)

    def train(self) -> Summary:
        """Train to the end and return what it came to; an error of the pipeline ends it with nothing half updated.

        What cannot be saved ends it before the first step, by CheckpointError.
        Raises Stopped on all processes, after the state was saved, where one of them was asked to stop.
        """
        try:
            self._stop_if_asked(self.pipeline.job.gather_all(self.asked_to_stop()))
            if not self._is_done:
                self._checkpoints.rehearse(self._position, self._totals.resumable())
            while not self._is_done:
                self._train_epoch()
            self._checkpoints.finish()
        except Stopped:
            self._close_loaders()
            raise
        except BaseException as error:
            # Such as a broken image: the other stages would wait for this one. A CheckpointError is another's perhaps.
            self.pipeline.job.abort(PipelineError(str(error)) if isinstance(error, CheckpointError) else error)
            self._checkpoints.abandon()
            raise  # with loaders whose processes may hang: who ends this process ends them too
        self._close_loaders()
        peaks = [peak for peak in self.pipeline.job.gather(self._totals.peak_memory_bytes) if peak is not None]
        return self._totals.summary(
            self.pipeline.step, self._epoch, max(peaks, default=None), self.examples, self.num_untimed_steps
        )

    def _close_loaders(self) -> None:
        for loader in (self.train_loader, *self.evaluation_loaders.values()):
            loader.close()

    def _train_epoch(self) -> None:
        """Train on what is left of the current epoch."""
        self.train_loader.set_epoch(self._epoch)
        self.train_loader.start_batch = self._batch
        waited_seconds, num_replaced = 0.0, 0
        started = time.perf_counter()
        for batch in loaded(self.train_loader, self.pipeline):
            values, report = self._step(batch)
            values["wait_seconds"] = self.train_loader.wait_seconds - waited_seconds
            waited_seconds = self.train_loader.wait_seconds
            if self.train_loader.num_replaced > num_replaced:
                values[f"replaced_{self.examples}"] = self.train_loader.num_replaced - num_replaced
                self._totals.num_replaced += self.train_loader.num_replaced - num_replaced
                num_replaced = self.train_loader.num_replaced
            self._batch += 1
            seconds = time.perf_counter() - started
            if report is None:
                self._log_skipped(values, seconds)
            else:
                num_targets = 0 if batch[1] is None else round(self.count_targets(batch[1]))
                self._log(values, report, num_targets, seconds)
            notes = report.notes if report is not None else []
            self._after_step([note["save"] for note in notes])
            if self._is_done:
                return
            self._stop_if_asked([note["stop"] for note in notes])
            started = time.perf_counter()

    def _step(self, batch: tuple[Any, Any]) -> tuple[dict[str, Any], StepReport | None]:
        """Make one update; return its settings and norms to log, and the pipeline's report, None where skipped."""
        step = self.pipeline.step
        values: dict[str, Any] = {"learning_rate": self.learning_rate(step)}
        set_learning_rate(self.optimizer, values["learning_rate"])
        if self.set_drop_path is not None:
            values["drop_path"] = self.final_drop_path * step / max(1, self.num_steps - 1)
            self.set_drop_path(values["drop_path"])
        records = _is_due(step, self.timeline_every_steps)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with self.autocast():
                report = self.pipeline.train_step(batch, record_timeline=records, note=self._note)
        except NonFiniteError as error:
            self._skip_or_stop(batch, error)
            return values, None
        if self.max_gradient_norm is not None:
            values["gradient_norm"] = self.pipeline.clip_gradients(self.max_gradient_norm)
        self._checkpoints.wait_until_copied()
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.pipeline.step)
        return values, report

    def _note(self) -> dict[str, Any]:
        """Return what every process of the job learns of this one at the end of a step."""
        return {"stop": self.asked_to_stop(), "save": self._checkpoints.status()}

    def _skip_or_stop(self, batch: tuple[Any, Any], error: NonFiniteError) -> None:
        """Count a step without an update, or end the training with a report, and a checkpoint of the state before."""
        self.optimizer.zero_grad(set_to_none=True)
        skipped = self._totals.num_skipped_steps
        if self.non_finite == "skip" and skipped < self.max_skipped_steps:
            self._totals.num_skipped_steps += 1
            count = f"{skipped + 1} of at most {self.max_skipped_steps}"
            self.progress.message(f"a mini-batch is left out, {count}: {error.what}")
            self.pipeline.step += 1
            return
        with self.autocast():
            place = self.pipeline.first_non_finite(batch)
        self._save()
        self._checkpoints.finish()
        raise explain(error, place, skipped=skipped, is_saved=self.checkpoint_folder is not None) from None

    def _log_skipped(self, values: dict[str, Any], seconds: float) -> None:
        self._totals.seconds += seconds
        self._totals.wait_seconds += values["wait_seconds"]
        skipped = self._totals.num_skipped_steps
        self.tracker.log({"step": self.pipeline.step, "epoch": self._epoch, **values, "num_skipped_steps": skipped})

    def _stop_if_asked(self, reasons: Sequence[str | None]) -> None:
        """Save and raise Stopped where a process of the job was asked to stop; all processes have the same reasons."""
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            return
        if self.pipeline.step > 0:
            self._save()
        self._checkpoints.finish()
        raise Stopped(reason, self.pipeline.step, is_saved=self._checkpoints.saved_step == self.pipeline.step)

    def _log(self, values: dict[str, Any], report: StepReport, num_targets: int, seconds: float) -> None:
        """Add a finished step to the totals, the log and the progress; `seconds` include the wait for data."""
        totals = self._totals
        if report.timeline is not None:
            if self.pipeline.job.overlaps:
                totals.bubble = values["bubble"] = report.timeline.bubble
            if self.on_timeline is not None:
                self.on_timeline(report.timeline)
        totals.seconds += seconds
        totals.wait_seconds += values["wait_seconds"]
        replicas = self.pipeline.job.num_replicas
        speed = StepSpeed(seconds, values["wait_seconds"], report.num_examples * replicas, num_targets * replicas)
        totals.speeds.append(speed)
        totals.peak_memory_bytes = report.peak_memory_bytes
        status = StepStatus(
            step=self.pipeline.step,
            epoch=self._epoch,
            loss=report.loss,
            top1=report.metrics.get("top1"),
            examples_per_second=speed.num_examples / seconds,
            examples=self.examples,
            peak_memory_bytes=totals.peak_memory_bytes,
            bubble=totals.bubble,
        )
        self.tracker.log(
            {
                "step": status.step,
                "epoch": status.epoch,
                "loss": report.loss,
                **report.metrics,
                **values,
                "examples_per_second": status.examples_per_second,
                "step_seconds": report.step_seconds,
                "peak_memory_bytes": status.peak_memory_bytes,
            }
        )
        self.progress.update(status, ends_epoch=self._batch == len(self.train_loader))

    def _after_step(self, saves: Sequence[dict[str, Any] | None]) -> None:
        """Turn to the next epoch where this one ends, evaluate and save where it is time, in this order.

        A checkpoint at the end of an epoch thus has the epoch's evaluation, and a resumed run need not repeat it.
        saves: how the save that is under way goes, on each process of the job.
        """
        self._checkpoints.check(saves)
        step = self.pipeline.step
        ends_epoch = self._batch == len(self.train_loader)
        if ends_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        is_epoch_due = ends_epoch and _is_due(self._epoch, self.evaluate_every_epochs)
        if is_epoch_due or _is_due(step, self.evaluate_every_steps) or (self._is_done and self._evaluates):
            self._evaluate()
        # An evaluation may have ended the training.
        is_best = self._totals.least_loss.get("step") == step
        if self._is_done or _is_due(step, self.save_every_steps) or (is_best and self.save_every_steps is not None):
            self._save(is_best=is_best)

    def _evaluate(self) -> None:
        """Evaluate on every evaluation set, with the averaged weights where there are any, and log it."""
        started = time.perf_counter()
        layers = self.ema.module if self.ema is not None else None
        loaders = self.evaluation_loaders.items()
        with self.evaluation_autocast(), self.pipeline.job.doing(f"evaluation after step {self.pipeline.step}"):
            evaluation = {name: evaluate(self.pipeline, loader, layers, self.metrics) for name, loader in loaders}
        self._totals.add_evaluation(evaluation, self.pipeline.step)
        self._totals.seconds += time.perf_counter() - started
        for name, metrics in evaluation.items():
            values = {f"{name}/{metric}": value for metric, value in metrics.items()}
            if self.evaluation_loaders[name].num_replaced:
                values[f"{name}/replaced_{self.examples}"] = self.evaluation_loaders[name].num_replaced
            self.tracker.log({"step": self.pipeline.step, "epoch": self._epoch, **values})
            whole = "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items() if "/" not in metric)
            self.progress.message(f"evaluation on {name} after step {self.pipeline.step}: {whole}")

    def _save(self, *, is_best: bool = False) -> None:
        self._checkpoints.save(self._position, self._totals.resumable(), is_best=is_best)


def _is_due(count: int, every: int | None) -> bool:
    """Say whether something is done at this count, once in `every`; None is never."""
    return every is not None and count % every == 0
