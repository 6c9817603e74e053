"""The training loop: a step, the end of an epoch, and resuming."""

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.checkpoint.content import Content
from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.folder import list_newest_first
from gpipe.checkpoint.manifest import Manifest, Position
from gpipe.checkpoint.read import load_checkpoint, load_weights
from gpipe.checkpoint.saver import Saver
from gpipe.durable_files import replacing
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.job.errors import NonFiniteError, PipelineError, StepAbandoned
from gpipe.pipeline.measurement.step_report import StepReport
from gpipe.pipeline.microbatch import Payload, find_batch_size
from gpipe.pipeline.step_end.gradient_scaler import GradientScaler
from gpipe.pipeline.timeline import Timeline
from gpipe.training.checkpoints import get_tensors, wrap_optimizer
from gpipe.training.ema import Ema
from gpipe.training.endings import Stopped, explain_non_finite, explain_non_finite_evaluation
from gpipe.training.evaluation import EvaluationMetrics, Metrics, evaluate_on_all
from gpipe.training.learning_rate import Schedule
from gpipe.training.loader import Loader, iterate
from gpipe.training.optimizers import named_parameters_of, set_learning_rate
from gpipe.training.progress import Progress
from gpipe.training.refusals import refuse_unfit
from gpipe.training.statistics import estimate_statistics
from gpipe.training.summary import StepSpeed, Summary, Totals
from gpipe.training.tracking import Tracker


def count_first(targets: Any) -> int:
    """Return the number of elements of the targets' first tensor."""
    return Payload.of_mini_batch(targets)[0].tensors[0].numel()


@dataclass(kw_only=True)
class Trainer:
    """Trains a pipeline; every process creates a trainer and calls the same methods.

        for each mini-batch: learning rate, drop-path rate -> pipeline.train_step -> clip -> update -> average -> log
        at the end of an epoch: estimate batch norms' statistics, evaluate on the averages; every n steps: save

    The learning rate and the drop-path rate, which rises linearly from 0, are functions of the number of finished
    steps. Only the pipeline, the optimiser and the training data are required.

    Attributes:
        optimizer: built from `pipeline.named_parameters()`; its state is saved under these names.
        train_loader: such as a `gpipe.data.DatasetLoader`.
        num_epochs: the length of the whole training.
        learning_rate: a function of the number of finished steps; None leaves the optimiser's as it is.
        tracker: the log; None keeps none.
        progress: shows the training; None shows it in the first process.
        seed: the seed of the data's order, which checkpoints store; None takes the pipeline's.
        max_steps: ends the training early, and counts as its length.
        max_gradient_norm: clips the norm over all stages.
        autocast, evaluation_autocast: create the contexts of training and of evaluation, such as torch.autocast's.
        scaler: scales the loss for float16. A step whose gradients overflow updates nothing, and counts as a step.
        evaluation_loaders: loaders by name; the first is the main one. Without any, nothing is evaluated.
        metrics: the metrics of evaluations, instead of the pipeline's loss; by default a loss and accuracies of
            classes. For other outputs or targets give your own, see `gpipe.training.evaluation.Metrics`.
        evaluate_every_epochs, evaluate_every_steps: evaluate at these intervals and at the end; never if both are None.
        statistics_loader: like `train_loader`; before an evaluation, it estimates the statistics of batch norms.
        num_statistics_batches: the number of mini-batches of an estimate; None evaluates with the moving averages.
        max_evaluation_batches: the most mini-batches to evaluate per set, spread evenly; None means all.
        evaluate_raw: whether to evaluate the weights themselves beside their moving averages.
        profile_step: torch's profiler records this step, and this process writes `profile_file`, a trace for Perfetto.
        patience: end training after this many evaluations in a row without a lower loss on the main set; None never.
        final_drop_path: the drop-path rate of the last step.
        examples: what messages call the data's examples.
        count_targets: returns the number of targets of a mini-batch, on the last stage; by default the number of
            elements of their first tensor.
        num_untimed_steps: the number of first steps that the summary's speed leaves out.
        checkpoint_folder: `resume` loads from it, and training saves there, at its end at least; None saves nothing.
        keep_checkpoints: the number of newest checkpoints to keep, besides the best; None saves nothing.
        save_every_steps: save every n steps, besides at the end and whenever the evaluation loss improves.
        timeline_every_steps: record the timeline of every nth step after the untimed ones, and of the last step, and
            pass it to `on_timeline`.
        asked_to_stop: returns why training should stop, or None. If any process returns a reason, all stop before the
            next step.
        non_finite: "stop" ends the training at a loss or gradient that is not finite (see `explain_non_finite`); "skip"
            skips the update for that mini-batch, up to `max_skipped_steps` times.
    """

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    train_loader: Loader
    num_epochs: int = 1
    max_steps: int | None = None
    learning_rate: Schedule | None = None
    evaluation_loaders: Mapping[str, Loader] = field(default_factory=dict)
    tracker: Tracker | None = None
    progress: Progress | None = None
    seed: int | None = None
    ema: Ema | None = None
    max_gradient_norm: float | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    evaluation_autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: GradientScaler | None = None
    set_drop_path: Callable[[float], None] | None = None
    final_drop_path: float = 0.0
    examples: str = "examples"
    count_targets: Callable[[Any], float] = count_first
    num_untimed_steps: int = 1
    evaluate_every_epochs: int | None = 1
    evaluate_every_steps: int | None = None
    statistics_loader: Loader | None = None
    num_statistics_batches: int | None = None
    max_evaluation_batches: int | None = None
    evaluate_raw: bool = True
    profile_step: int | None = None
    profile_file: Path | None = None
    metrics: Metrics = field(default_factory=EvaluationMetrics)
    patience: int | None = None
    checkpoint_folder: Path | None = None
    save_every_steps: int | None = None
    keep_checkpoints: int | None = 3
    timeline_every_steps: int | None = None
    on_timeline: Callable[[Timeline], None] | None = None
    asked_to_stop: Callable[[], str | None] = lambda: None
    non_finite: str = "stop"
    max_skipped_steps: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unfit(self)
        if self.checkpoint_folder is not None:
            self.checkpoint_folder = Path(self.checkpoint_folder)
            named_parameters_of(self.optimizer)  # by which its state is saved
        self._epoch, self._batch, self._totals = 0, 0, Totals()
        self._seed = self.pipeline.seed if self.seed is None else self.seed
        self._tracker = self.tracker or Tracker(Path(), enabled=False)
        job = self.pipeline.job
        is_main = job.process == 0 and job.replica_index == 0
        self._progress = self.progress or Progress(self.num_steps, self.num_epochs, enabled=is_main)
        self._saves = self.checkpoint_folder is not None and self.keep_checkpoints is not None
        self._saver = Saver(self.checkpoint_folder or Path(), self.pipeline, keep=self.keep_checkpoints or 1)

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole training."""
        return min(self.num_epochs * len(self.train_loader), self.max_steps or sys.maxsize)

    @property
    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return get_tensors(self.pipeline, self.ema)

    @property
    def _content(self) -> Content:
        """What a checkpoint has now."""
        self._totals.scaler = None if self.scaler is None else self.scaler.state_dict()
        return Content(
            Position(self.pipeline.step, self._epoch, self._batch, self._seed),
            self._tensors,
            wrap_optimizer(self.optimizer),
            config=self.config,
            results=self._totals.resumable(),
        )

    @property
    def _is_done(self) -> bool:
        is_out_of_patience = self.patience is not None and self._totals.num_worse >= self.patience
        return is_out_of_patience or self.pipeline.step >= self.num_steps

    @property
    def _evaluates_at_end(self) -> bool:
        is_ever = self.evaluate_every_epochs is not None or self.evaluate_every_steps is not None
        return is_ever and bool(self.evaluation_loaders)

    @property
    def _is_best(self) -> bool:
        return self._totals.least_loss.get("step") == self.pipeline.step

    @property
    def _is_saved(self) -> bool:
        return self._saver.saved_step == self.pipeline.step

    def resume(self, path: Path | None = None) -> bool:
        """Resume from a checkpoint, or from the newest good one in `checkpoint_folder`; return whether there is one.

        The run then equals, bit for bit, one that never stopped.

        Raises:
            CheckpointError: the checkpoint, or each in the folder, is damaged, or belongs to another model.
            ValueError: it has another seed or number of mini-batches per epoch.
        """
        if (found := self._load(path)) is None:
            return False
        path, manifest = found
        position = manifest.position
        if position.seed != self._seed:
            raise ValueError(f"{path} was saved with seed {position.seed}, not {self._seed}: resume with that seed.")
        if position.step != position.epoch * len(self.train_loader) + position.batch:
            raise ValueError(
                f"{path} was saved at step {position.step}, mini-batch {position.batch} of epoch {position.epoch}, but "
                f"here an epoch has {len(self.train_loader)} mini-batches: resume with the same data and batch size."
            )
        self.pipeline.step, self._epoch, self._batch = position.step, position.epoch, position.batch
        self._totals = Totals.resume(manifest.results, [*self.evaluation_loaders])
        if path.parent == self.checkpoint_folder:
            self._saver.saved_step = position.step
        else:
            self._totals.forget_evaluations()  # they, and the checkpoint with the lowest loss, are another run's
        if self.scaler is not None and self._totals.scaler is not None:
            self.scaler.load_state_dict(self._totals.scaler)
        self._tracker.rewind(position.step)
        return True

    def _load(self, named: Path | None) -> tuple[Path, Manifest] | None:
        """Load the named checkpoint, or the newest undamaged one in the folder, and warn of damaged ones there."""
        newest = [] if self.checkpoint_folder is None else list_newest_first(self.checkpoint_folder)
        for path in newest if named is None else [named]:
            try:
                return path, load_checkpoint(path, self.pipeline, self._tensors, wrap_optimizer(self.optimizer))
            except DamagedCheckpoint as damage:
                if named is not None:
                    raise
                self._progress.message(f"warning: {damage}")
        if newest:  # a new run would silently overwrite them
            raise CheckpointError(
                f"{self.checkpoint_folder} has {len(newest)} checkpoints, all of them damaged: remove it to start anew."
            )
        return None

    def start_from(self, path: Path, replaced: Collection[str]) -> None:
        """Load the averages of another run's checkpoint, or its weights if it has none.

        The tensors named in `replaced` stay as they are.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        model, names = self.config.get("model"), self.config.get("model_names")
        load_weights(path, self.pipeline, self._tensors, replaced=replaced, settings=model, model_names=names)

    def train(self) -> Summary:
        """Train to the end and return a summary; an error in the pipeline leaves nothing half updated.

        Raises:
            CheckpointError: the training cannot be saved; if possible, this is raised before the first step.
            Stopped: a process was asked to stop; it is raised on all processes, after the state is saved.
            ValueError: something else has trained the pipeline.
        """
        own_step = self._epoch * len(self.train_loader) + self._batch
        if self.pipeline.step != own_step:
            raise ValueError(
                f"pipeline.step is {self.pipeline.step}, but this trainer is at step {own_step} of "
                f"{self.num_steps}: something else has trained the pipeline; set pipeline.step = 0 to begin a training "
                "with its weights, or resume from a checkpoint."
            )
        try:
            self._stop_if_asked(self.pipeline.job.gather_all(self.asked_to_stop()))
            if self._saves and not self._is_done:
                self._saver.rehearse(self._content)
            with closing(self._progress):
                if self._is_done and self._evaluates_at_end and self._totals.evaluated_step != self.pipeline.step:
                    self._evaluate()  # an earlier session ended there because a loss was not finite
                while not self._is_done:
                    self._train_epoch()
                self._warn_of_old_checkpoints()
            self._saver.wait()
        except Stopped:
            self._close_loaders()
            raise
        except BaseException as error:
            # The other stages would wait for this one, after a broken image for example. All may raise CheckpointError.
            self.pipeline.job.abort(PipelineError(str(error)) if isinstance(error, CheckpointError) else error)
            self._saver.abandon()
            raise  # without closing loaders, whose processes may hang: they exit with this process
        self._close_loaders()
        peaks = [peak for peak in self.pipeline.job.gather(self._totals.peak_memory_bytes) if peak is not None]
        return self._totals.summarize(
            self.pipeline.step, self._epoch, max(peaks, default=None), self.examples, self.num_untimed_steps
        )

    def _close_loaders(self) -> None:
        for loader in (self.train_loader, *self.evaluation_loaders.values()):
            loader.close()

    def _warn_of_old_checkpoints(self) -> None:
        """Warn if training has ended unsaved in a folder whose checkpoints could be taken for its outcome."""
        saved_step = self._saver.saved_step
        if saved_step is not None and not self._is_saved:
            self._progress.message(
                f"warning: training ended after step {self.pipeline.step}, but the newest checkpoint in "
                f"{self.checkpoint_folder} is of step {saved_step}, because trainer.checkpoints.keep is null: set it "
                "to save the end."
            )

    def _train_epoch(self) -> None:
        """Train on the rest of the current epoch."""
        self.train_loader.set_epoch(self._epoch)
        self.train_loader.batch_numbers = range(self._batch, len(self.train_loader))
        waited_seconds, num_replaced, started = 0.0, 0, time.perf_counter()
        for batch in iterate(self.train_loader, self.pipeline):
            with self._profile():
                values, report = self._step(batch)
            values["wait_seconds"] = self.train_loader.wait_seconds - waited_seconds
            waited_seconds = self.train_loader.wait_seconds
            notes = report.notes if report is not None else []
            if (replaced := sum(note["replaced"] for note in notes)) > num_replaced:  # of all replicas, in this epoch
                values[f"replaced_{self.examples}"] = replaced - num_replaced
                self._totals.num_replaced += replaced - num_replaced
                num_replaced = replaced
            self._batch += 1
            seconds = time.perf_counter() - started
            self._totals.seconds += seconds
            self._totals.wait_seconds += values["wait_seconds"]
            if report is None or report.is_skipped:
                place = {"step": self.pipeline.step, "epoch": self._epoch}
                self._tracker.log({**place, **values, "num_skipped_steps": self._totals.num_skipped_steps})
            else:
                self._log(values, report, seconds)
            has_evaluated = self._after_step([note["save"] for note in notes])
            if self._is_done:
                return
            reasons = [note["stop"] for note in notes]
            if has_evaluated:  # that takes long: a process asked to stop meanwhile should not wait for another step
                reasons += self.pipeline.job.gather_all(self.asked_to_stop())
            self._stop_if_asked(reasons)
            started = time.perf_counter()

    @contextmanager
    def _profile(self) -> Iterator[None]:
        """Profile the step in the block if it is `profile_step`."""
        if self.profile_file is None or self.pipeline.step != self.profile_step:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # otherwise the profiler logs to stderr
        with torch.profiler.profile() as profiler:
            yield
        with replacing(self.profile_file) as path:
            profiler.export_chrome_trace(str(path))
        self._progress.message(f"step {self.profile_step}: torch's profile is in {self.profile_file}")

    def _step(self, batch: tuple[Any, Any]) -> tuple[dict[str, Any], StepReport | None]:
        """Make one update; return its settings and norms for the log, and the pipeline's report (None if skipped)."""
        step = self.pipeline.step
        if self.learning_rate is not None:
            set_learning_rate(self.optimizer, self.learning_rate(step))
        values: dict[str, Any] = {"learning_rate": self.optimizer.param_groups[0]["lr"]}
        if self.set_drop_path is not None:
            values["drop_path"] = self.final_drop_path * step / max(1, self.num_steps - 1)
            self.set_drop_path(values["drop_path"])
        records = _is_due(step - self.num_untimed_steps, self.timeline_every_steps) or (
            self.timeline_every_steps is not None and step == self.num_steps - 1
        )
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with self.autocast():
                report = self.pipeline.train_step(
                    batch,
                    record_timeline=records,
                    note=partial(self._note, batch[1]),
                    scaler=self.scaler,
                    max_gradient_norm=self.max_gradient_norm,
                )
            if self.scaler is not None:
                values["loss_scale"] = self.scaler.scale
                if report.is_skipped and self.scaler.scale < 1:
                    self.scaler.num_skipped -= 1  # this mini-batch stops the run, or counts as one that is not finite
                    raise NonFiniteError(f"gradients overflow float16 at a loss scale of {self.scaler.scale:g}")
        except NonFiniteError as error:
            self._skip_or_stop(batch, error)
            return values, None
        except StepAbandoned as error:
            self._stop_if_asked([note["stop"] for note in error.notes])
            raise
        if report.is_skipped:
            self.pipeline.step += 1
            return values, report
        if report.gradient_norm is not None:
            values["gradient_norm"] = report.gradient_norm
        self._saver.wait_until_copied()
        self.optimizer.step()
        if self.ema is not None:
            num_skipped = self._totals.num_skipped_steps + (self.scaler.num_skipped if self.scaler is not None else 0)
            self.ema.update(self.pipeline.step - num_skipped)
        return values, report

    def _note(self, targets: Any) -> dict[str, Any]:
        """Return what this process sends to all others at the end of a step."""
        stop, save = self.asked_to_stop(), self._saver.status()
        sizes = [0, 0]
        if self.pipeline.is_last:
            sizes = [find_batch_size(targets, "targets"), round(self.count_targets(targets))]
        return {"stop": stop, "save": save, "replaced": self.train_loader.num_replaced, "sizes": sizes}

    def _skip_or_stop(self, batch: tuple[Any, Any], error: NonFiniteError) -> None:
        """Skip the update, or save the state before the step and end the training with an explanation."""
        self.optimizer.zero_grad(set_to_none=True)
        skipped = self._totals.num_skipped_steps
        if self.non_finite == "skip" and skipped < self.max_skipped_steps:
            self._totals.num_skipped_steps += 1
            self.pipeline.step += 1
            self._progress.message(f"skipping a mini-batch, {skipped + 1} of {self.max_skipped_steps}: {error.what}")
            return
        with self.autocast():
            place = self.pipeline.first_non_finite(batch)
        self._save()
        self._saver.wait()
        raise explain_non_finite(error, place, skipped=skipped, is_saved=self._is_saved) from None

    def _stop_if_asked(self, reasons: Sequence[str | None]) -> None:
        """Save and raise Stopped if a process was asked to stop; `reasons` are those of all processes."""
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            return
        if self.pipeline.step > 0:
            self._save()
        self._saver.wait()
        raise Stopped(reason, self.pipeline.step, saved_step=self._saver.saved_step)

    def _log(self, values: dict[str, Any], report: StepReport, seconds: float) -> None:
        """Add a finished step to the totals, the log and the progress; `seconds` includes the wait for data."""
        totals = self._totals
        if report.timeline is not None:
            if self.pipeline.job.overlaps:
                totals.bubble = values["bubble"] = report.timeline.bubble
            if self.on_timeline is not None:
                self.on_timeline(report.timeline)
        sizes = zip(*(note["sizes"] for note in report.notes), strict=True)  # replicas may differ
        speed = StepSpeed(seconds, values["wait_seconds"], *map(sum, sizes))
        totals.speeds.append(speed)
        totals.peak_memory_bytes = report.peak_memory_bytes
        line = {
            "step": self.pipeline.step,
            "epoch": self._epoch,
            "loss": report.loss,
            **report.metrics,
            **values,
            "examples_per_second": speed.num_examples / seconds,
            "step_seconds": report.step_seconds,
            "peak_memory_bytes": report.peak_memory_bytes,
        }
        self._tracker.log(line)
        ends_epoch = self._batch == len(self.train_loader)
        self._progress.update(line | {"bubble": totals.bubble}, examples=self.examples, ends_epoch=ends_epoch)

    def _after_step(self, saves: Sequence[dict[str, Any] | None]) -> bool:
        """At the end of an epoch, start the next; evaluate and save if due; return whether it evaluated.

        In this order, a checkpoint at the end of an epoch has its evaluation, and a resumed run need not repeat it.
        `saves` are all processes' statuses of the save under way.
        """
        self._saver.check(saves)
        step, every_epochs, every_steps = self.pipeline.step, self.evaluate_every_epochs, self.evaluate_every_steps
        ends_epoch = self._batch == len(self.train_loader)
        if ends_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        is_due = _is_due(step, every_steps) or (ends_epoch and _is_due(self._epoch, every_epochs))
        evaluates = (is_due and bool(self.evaluation_loaders)) or (self._is_done and self._evaluates_at_end)
        if evaluates:
            self._evaluate()
        # An evaluation may have ended the training.
        if self._is_done or self._is_best or _is_due(step, self.save_every_steps):
            self._save()
        return evaluates

    def _evaluate(self) -> None:
        """Evaluate on every evaluation set, and log the figures."""
        started = time.perf_counter()
        averages = self.ema.module if self.ema is not None else None
        with self.pipeline.job.activity.doing(f"evaluation after step {self.pipeline.step}"):
            evaluation = evaluate_on_all(
                self.pipeline,
                self.evaluation_loaders,
                averages,
                self.metrics,
                raw=self.evaluate_raw,
                max_batches=self.max_evaluation_batches,
                autocast=self.evaluation_autocast,
                prepare=self._estimate_statistics,
            )
        self._totals.seconds += time.perf_counter() - started
        for name, metrics in evaluation.items():
            values = {f"{name}/{metric}": value for metric, value in metrics.items()}
            if num_replaced := sum(self.pipeline.job.gather_all(self.evaluation_loaders[name].num_replaced)):
                values[f"{name}/replaced_{self.examples}"] = num_replaced
            self._tracker.log({"step": self.pipeline.step, "epoch": self._epoch, **values})
            whole = "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items() if "/" not in metric)
            self._progress.message(f"evaluation on {name} after step {self.pipeline.step}: {whole}")
        for name, metrics in evaluation.items():
            for metric, value in metrics.items():
                if metric.endswith("loss") and not math.isfinite(value):
                    self._save()  # without this evaluation
                    self._saver.wait()
                    what = f"{metric} on {name}"
                    raise explain_non_finite_evaluation(what, value, self.pipeline.step, is_saved=self._is_saved)
        self._totals.add_evaluation(evaluation, self.pipeline.step)

    def _estimate_statistics(self, layers: nn.ModuleDict | None) -> None:
        if self.statistics_loader is None or self.num_statistics_batches is None:
            return
        self._saver.wait_until_copied()  # after a skipped step, a save may still be copying the averages
        self.statistics_loader.set_epoch(self._epoch)
        with self.autocast():
            estimate_statistics(self.pipeline, self.statistics_loader, self.num_statistics_batches, layers)

    def _save(self) -> None:
        if self._saves and not self._is_saved:
            self._saver.save(self._content, is_best=self._is_best)


def _is_due(count: int, every: int | None) -> bool:
    """Return whether something is due at this count, every `every` counts from 0 on; never if None."""
    return every is not None and count >= 0 and count % every == 0
