"""The pipeline: runs this process's tasks of each step."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from gpipe.pipeline import batch_norm, gradient_norm
from gpipe.pipeline.executor import Executor, make_plan
from gpipe.pipeline.guard import Guard
from gpipe.pipeline.job.errors import LostPeer, NonFiniteError
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.job.topology import Processes
from gpipe.pipeline.job.watch import Activity, Watch
from gpipe.pipeline.loss import LossFunction, LossWeight, MiniBatchLoss
from gpipe.pipeline.microbatch import batch_size_of, microbatch_sizes
from gpipe.pipeline.modes import evaluation_mode
from gpipe.pipeline.partition import check_partitions, partition_ranges
from gpipe.pipeline.placement import Devices, local_devices, process_device
from gpipe.pipeline.probe import NonFinite, Probe
from gpipe.pipeline.report import StepReport, peak_memory_bytes
from gpipe.pipeline.schedule import SCHEDULES, Rematerialize, check_stages_per_device
from gpipe.pipeline.shared.replicas import Averaging
from gpipe.pipeline.shared.tied_parameters import TiedGradients, Ties
from gpipe.pipeline.stage import Stage
from gpipe.pipeline.timeline import Clock, Timeline
from gpipe.pipeline.transfer import LocalTransfer, MiniBatch, Transfer


class Pipeline:
    """Trains a sequence of layers, cut into partitions, by pipelined micro-batches (GPipe, section 2).

    Gradients, moving averages and masks do not depend on the number of partitions, on re-materialisation, or on whether
    one process plays all stages or each stage has its own. The 1F1B schedules add up the micro-batches from the first
    on, GPipe from the last on: between the two, gradients differ by rounding.

    Args:
        layers: the model, a plain sequence. A layer takes what the one before returns: a tensor, or nested tuples,
            lists and dicts of tensors and None. Layers on the meta device get their memory and initial weights here,
            those of other processes never. Batch norms must have gone through `convert_batch_norm`.
            A parameter that several layers share becomes one copy a layer, in place; all copies get the values of the
            first and, in each step, the sum of all their gradients, so that any optimizer keeps them equal.
        loss: (outputs, targets) -> the mean loss of a micro-batch, a scalar tensor; or (loss, {name: scalar tensor}),
            whose scalars appear in the report.
        partitions: the number of layers of each stage, such as `partition_layers` returns.
        num_microbatches: M, into which each mini-batch is cut; smaller mini-batches make fewer, never empty ones.
        rematerialize: "always", "except_last" or "never": which micro-batches recompute their activations.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b" (`gpipe.pipeline.schedule`).
        stages_per_device: at least 2 in the interleaved schedule, where stage s of K is on device s % P, P = K / this.
        devices: of each stage, for one process; or of this process. Default: where the layers are; on a mesh, its type.
        mesh: R x P processes with the dimensions ("replica", "stage"); None: this process plays all stages.
        seed: of initial weights (with the layer) and masks (with the step, the micro-batch and the layer).
        loss_weight: targets of a micro-batch -> how much its mean counts; default: its number of examples.
        timeout_seconds: after which a silent peer is named and the step given up.
        synchronize_batch_norm: normalise a micro-batch by its statistics over all R replicas, as if these were one
            process with the micro-batch of all. Every replica then cuts its mini-batch into as many micro-batches as
            the smallest one makes, and must use the same batch norms in the same order. Those without moving averages
            are synchronised too; evaluation exchanges nothing. Without replicas it changes nothing: the statistics of
            the micro-batch are those over all replicas.

    Attributes:
        layers: this process's layers, under their index in the whole model.
        step: the number of finished training steps; set it to resume.
        timeout_seconds: as given.

    Raises:
        ValueError: settings that do not fit each other; the message names the value and the remedy.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        loss: LossFunction,
        partitions: Sequence[int],
        num_microbatches: int = 32,
        *,
        rematerialize: str = "always",
        schedule: str = "gpipe",
        stages_per_device: int = 1,
        devices: Devices = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        loss_weight: LossWeight | None = None,
        timeout_seconds: float = 300.0,
        synchronize_batch_norm: bool = False,
    ) -> None:
        if not isinstance(layers, nn.Sequential):
            raise TypeError(
                f"layers is of type {type(layers).__name__}; it must be an nn.Sequential of the model's layers"
            )
        check_partitions(partitions, len(layers))
        ranges = partition_ranges(partitions)
        batch_norm.refuse_unconverted(layers)
        ties = Ties(layers)
        self.num_microbatches = _positive(num_microbatches)
        self.rematerialize = _one_of(rematerialize, Rematerialize, "rematerialize")
        self._schedule = SCHEDULES[_one_of(schedule, SCHEDULES, "schedule")]
        self.partitions = tuple(partitions)
        self.num_layers, self.num_stages, self.stages_per_device = len(layers), len(partitions), stages_per_device
        check_stages_per_device(schedule, self.num_stages, stages_per_device)
        self.seed, self.step, self.timeout_seconds = seed, 0, timeout_seconds
        self._loss, self._loss_weight = loss, loss_weight
        self._processes: Processes | None = None
        self._transfer: Transfer
        if mesh is None:
            places = dict(enumerate(local_devices(devices, layers, self.num_stages)))
            self._transfer = LocalTransfer(list(places.values()))
        else:
            device = process_device(devices, mesh)
            self._processes = Processes(mesh, self.num_stages, stages_per_device, device, timeout_seconds)
            settings = {
                "synchronize_batch_norm": synchronize_batch_norm,
                "partitions": list(partitions),
                "num_microbatches": num_microbatches,
                "rematerialize": rematerialize,
                "schedule": schedule,
                "stages_per_device": stages_per_device,
                "seed": seed,
            } | ties.settings()
            self._processes.require_agreement(settings)
            places = dict.fromkeys(self._processes.stages, device)
            self._transfer = self._processes.transfer()
        own = ties.build({i: place for k, place in places.items() for i in ranges[k]}, seed)
        self.layers = nn.ModuleDict({str(i): layer for i, layer in own.items()})
        self._stages = {k: Stage(k, {i: own[i] for i in ranges[k]}, place, seed) for k, place in places.items()}
        owners = [
            self._processes.process_of(k) if self._processes else 0 for k, part in enumerate(ranges) for _ in part
        ]
        self._tied = TiedGradients(ties.all, own, owners, self._processes)
        self._replicas = self._processes.replicas() if self._processes else None
        if self._processes is not None and self._replicas is not None:
            # Exchanges in the middle of a step need the same step in all replicas.
            compared = settings if synchronize_batch_norm else {"synchronize_batch_norm": False}
            self._processes.require_agreement(compared, self._replicas)
            for stage in self._stages.values():
                stage.averaging = Averaging(stage.layers, self._replicas)
        self._synchronizes = synchronize_batch_norm and self._synchronize(layers)
        check = self._processes.watch.check if self._processes else None
        self._activity = self._processes.watch.activity if self._processes else Activity()
        self._executor = Executor(
            self._stages, self.num_stages, self._transfer, check, stages_per_device, self._activity
        )
        self._batch_norms = batch_norm.converted_batch_norms(self.layers.values())
        # Gloo forgets what it has not delivered yet when its sender lets go of it, or exits.
        messengers = [part.messenger for part in (self._processes, self._replicas) if part is not None]
        watch = self._processes.watch if self._processes else None
        self._close = weakref.finalize(self, _deliver, self._transfer, messengers, watch)
        self._guard = Guard(
            self._executor,
            self._batch_norms,
            self._transfer,
            self._processes,
            list(places.values()),
            give_up=self._close.detach,  # what was sent will not be asked for any more
        )

    @property
    def is_first(self) -> bool:
        """Whether this process holds the first stage, and so needs the inputs."""
        return 0 in self._stages

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last stage, and so needs the targets and sees the outputs."""
        return self.num_stages - 1 in self._stages

    @property
    def num_devices(self) -> int:
        """P, the number of devices that the schedule has work for: K, or fewer where it is interleaved."""
        return self.num_stages // self.stages_per_device

    @property
    def replica_index(self) -> int:
        """Which of the R pipelines this process belongs to."""
        return self._processes.replica if self._processes else 0

    @property
    def stages(self) -> Mapping[int, Stage]:
        """This process's stages, by index."""
        return self._stages

    @property
    def num_replicas(self) -> int:
        """R, the number of pipelines that train the same weights."""
        return self._replicas.count if self._replicas else 1

    @property
    def overlaps(self) -> bool:
        """Whether stages can run at the same time: as processes, or on several devices; otherwise they take turns."""
        return self._processes is not None or len({stage.device for stage in self._stages.values()}) > 1

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of the copies of each parameter that several layers of the model share, in layer order."""
        return self._tied.names

    def train_step(
        self, batch: tuple[Any, Any], *, record_timeline: bool = False, note: Callable[[], Any] | None = None
    ) -> StepReport:
        """Add the gradients of a mini-batch's loss to the parameters' `.grad`, and move the moving averages once.

        Every process calls it. The parameters themselves are left to an optimizer.

        Args:
            batch: (inputs, targets), each a tensor or a nest whose tensors have the examples as first dimension.
                Inputs are looked at in the first stage's process only, targets in the last one's.
            record_timeline: whether to collect when each task ran, on all stages.
            note: called at the end of the step; what it returns, of JSON's types, is in the report of every process of
                the job, so that all of them learn of something at the same step without an exchange of its own.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, on every process. The gradients are unusable, no
                moving average has moved, and `step` stays as it is; another step may follow.
            PipelineError: an error in a layer, in the loss or in another process; it says where. With several
                processes the pipeline cannot be used any more.
        """
        begin = time.perf_counter()
        inputs, targets = _pair(batch)
        clock = Clock(cuda=record_timeline)
        with self._guard.step():
            mini_batch = self._start(inputs, self._common_num_microbatches(inputs), training=True)
            loss = self._minibatch_loss(targets, mini_batch) if self.is_last else None
            shape = self.num_stages, mini_batch.num_microbatches, self.rematerialize
            plan = make_plan(self._schedule, *shape, tuple(self._stages), self.stages_per_device)
            self._tied.start_step()
            self._executor.train(plan, self.step, loss, clock)
            with self.doing("adding up the gradients of tied parameters"):
                self._tied.finish_step()
            totals, notes = self._conclude(loss, note)
            self._commit()
            timeline = self._gathered_timeline(clock) if record_timeline else None
        return StepReport(
            step=self.step - 1,
            loss=totals.pop("loss"),
            metrics=totals,
            notes=notes,
            num_examples=mini_batch.num_examples,
            num_microbatches=mini_batch.num_microbatches,
            timeline=timeline,
            step_seconds=time.perf_counter() - begin,
            peak_memory_bytes=peak_memory_bytes({stage.device for stage in self._stages.values()}),
        )

    def first_non_finite(self, batch: tuple[Any, Any]) -> NonFinite | None:
        """Run the forward of a mini-batch again, as `train_step` did, and find where a number first is not finite.

        Every process calls it, after a NonFiniteError and with the same mini-batch. Nothing is updated.

        Returns:
            The first layer of the model with such an output, over all micro-batches and replicas, or the loss of one;
            None where all are finite.
        """
        inputs, targets = _pair(batch)
        with self._guard.step():
            mini_batch = self._start(inputs, self._common_num_microbatches(inputs), training=False)
            loss = self._minibatch_loss(targets, mini_batch) if self.is_last else None
            probe = Probe(self.replica_index)
            self._executor.probe(mini_batch.num_microbatches, self.step, loss, probe)
            rows = [row for part in self.gather_from_job(probe.found) for row in part]
        return NonFinite(*min(rows)) if rows else None

    def evaluate(self, inputs: Any, *, layers: nn.ModuleDict | None = None) -> Any:
        """Return the model's outputs for a mini-batch in evaluation mode, without gradients.

        Every process calls it. Modes are as before afterwards.

        Args:
            inputs: as for `train_step`, of any number of examples; None outside of the first stage.
            layers: run these in place of `self.layers`, such as their exponential moving average: same keys.

        Returns:
            The outputs of all examples in the last stage's process, None in the others.
        """
        used = self.layers if layers is None else layers
        if used.keys() != self.layers.keys():
            raise ValueError(
                f"the layers to evaluate are {list(used)}; give one for each of this process's layers, "
                f"{list(self.layers)}"
            )
        with self._guard.step(), evaluation_mode(used):
            mini_batch = self._start(inputs, self.num_microbatches, training=False)
            return self._executor.evaluate(mini_batch.num_microbatches, used)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield this process's parameters under the names layers.<index in the whole model>.<name>."""
        return self.layers.named_parameters(prefix="layers")

    def parameters(self) -> Iterator[Parameter]:
        """Yield this process's parameters, for an optimizer."""
        return self.layers.parameters()

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; every process calls it.

        Returns:
            The norm before, over all parameters of all stages; bitwise the same for every number of stages.

        Raises:
            PipelineError: the norm is not finite; nothing was scaled.
        """
        parts = self.gather(gradient_norm.gradient_norms(self._tied.once(self.named_parameters())))
        norms = gradient_norm.in_layer_order(parts)
        try:
            norm = gradient_norm.global_norm(norms)
        except ValueError as error:
            raise NonFiniteError(f"step {self.step - 1}: {error}") from None
        gradient_norm.scale_gradients(self.parameters(), max_norm, norm)
        return norm

    def compile(self, **options: Any) -> None:
        """Run each of this process's layers through torch.compile(**options); layers and names stay the same.

        Batch norms that are synchronised over replicas run uncompiled between two graphs: no fullgraph=True with them.
        """
        for stage in self._stages.values():
            stage.compile(**options)

    def gather(self, value: Any) -> list[Any]:
        """Return the values that the processes passed, in the order of their first stages; values are JSON's."""
        if self._processes is None:
            return [value]
        with self._guard.exchange():
            return self._processes.messenger.gather(value)

    def gather_from_job(self, value: Any) -> list[Any]:
        """Return the values of all replicas' processes, one replica after the other; values are JSON's."""
        values = self.gather(value)
        if self._replicas is None:
            return values
        with self._guard.exchange():
            return [one for part in self._replicas.gather(values) for one in part]

    def broadcast(self, value: Any, from_stage: int) -> Any:
        """Return the value that the process of one stage passed, to each; the value is JSON's."""
        if self._processes is None:
            return value
        with self._guard.exchange():
            return self._processes.messenger.broadcast(value, self._processes.process_of(from_stage))

    def abort(self, error: BaseException) -> None:
        """Tell the other processes of the pipeline that this one stops, and why, so that they stop at once."""
        self._guard.stop(error)

    @property
    def place(self) -> str:
        """What of the job this process is, and what it does, for messages: "rank 1, stage 1, between two steps"."""
        return self._processes.place if self._processes is not None else str(self._activity)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Note what this process does in the body, such as "loading data", for messages about its failure."""
        return self._activity.outside(what)

    def doing_beside(self, what: str) -> AbstractContextManager[None]:
        """Note what a thread of this process does in the body while the pipeline works, as `doing` does."""
        return self._activity.beside(what)

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the connections' threads; happens by itself at the end."""
        self._close()

    def _start(self, inputs: Any, num_microbatches: int, *, training: bool) -> MiniBatch:
        size = batch_size_of(inputs, "inputs") if self.is_first else None
        return self._executor.start(inputs, size, num_microbatches, training=training)

    def _common_num_microbatches(self, inputs: Any) -> int:
        """Return M or, where batch norms are synchronised, what every replica can cut its mini-batch into."""
        if not self._synchronizes or not self.is_first:
            return self.num_microbatches
        assert self._replicas is not None
        sizes: list[int] = self._replicas.gather(batch_size_of(inputs, "inputs"))
        return min(self.num_microbatches, *sizes)

    def _synchronize(self, layers: nn.Sequential) -> bool:
        """Let batch norms exchange their statistics over the replicas; return whether the model has any to do so."""
        if self._replicas is None or self._processes is None or not batch_norm.converted_batch_norms(layers):
            return False
        from gpipe.pipeline.shared.synchronized_norm import StatisticsExchange  # loads torch.compile's machinery

        named = self.layers.named_modules(prefix="layers")
        norms = {name: module for name, module in named if isinstance(module, batch_norm.MicroBatchNorm)}
        exchange = StatisticsExchange(self._processes.beside(self._replicas), norms)
        for stage in self._stages.values():
            stage.exchange = exchange
        return True

    def _minibatch_loss(self, targets: Any, mini_batch: MiniBatch) -> MiniBatchLoss:
        if (found := batch_size_of(targets, "targets")) != mini_batch.num_examples:
            raise ValueError(
                f"the mini-batch has {mini_batch.num_examples} inputs and {found} targets; every process must be given "
                "the same mini-batch"
            )
        sizes = microbatch_sizes(mini_batch.num_examples, mini_batch.num_microbatches)
        device = self._stages[self.num_stages - 1].device
        return MiniBatchLoss(self._loss, self._loss_weight, targets, sizes, device, self._replicas)

    def _conclude(
        self, loss: MiniBatchLoss | None, note: Callable[[], Any] | None
    ) -> tuple[dict[str, float], list[Any]]:
        """Exchange, in one message, what the step came to: the loss and metrics, a gradient's fault, and the notes."""
        norms = gradient_norm.gradient_norms(self._tied.once(self.named_parameters()))
        own = {
            "totals": loss.totals() if loss else None,
            "fault": [named for named in norms if not math.isfinite(named[1])][:1],
            "note": note() if note else None,
        }
        parts = self.gather(own)
        notes = [part["note"] for part in parts]
        if note is not None and self._replicas is not None:
            with self._guard.exchange():
                notes = [one for part in self._replicas.gather(notes) for one in part]
        (totals,) = (part["totals"] for part in parts if part["totals"] is not None)
        faults = gradient_norm.in_layer_order(part["fault"] for part in parts)
        if not math.isfinite(totals["loss"]) or faults:
            batch_norm.discard(self._batch_norms)
        if not math.isfinite(totals["loss"]):
            last = self.num_stages - 1
            raise NonFiniteError(f"the loss of step {self.step} is {totals['loss']} in stage {last}", stage=last)
        if faults:
            ((name, norm), *_) = faults
            raise NonFiniteError(f"the gradient of {name} in step {self.step} has the norm {norm}")
        return totals, notes

    def _commit(self) -> None:
        """Move the moving averages, and count the step."""
        if self._replicas is None:
            batch_norm.commit(self._batch_norms)
        else:
            with self._replicas.exchange():
                batch_norm.commit(self._batch_norms, self._replicas.group)
        self.step += 1

    def _gathered_timeline(self, clock: Clock) -> Timeline:
        events = clock.events()
        rows = [row for part in self.gather(Timeline(tuple(events), self.num_devices).to_json()) for row in part]
        origin = min(row[3] for row in rows)
        moved = [[*row[:3], row[3] - origin, row[4] - origin] for row in rows]
        return Timeline.from_json(moved, self.num_devices)


def _deliver(transfer: Transfer, messengers: Sequence[Messenger], watch: Watch | None) -> None:
    with suppress(LostPeer):
        for messenger in messengers:
            messenger.flush()
    transfer.close()
    if watch is not None:
        watch.close()


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        found = f"{len(batch)} entries" if isinstance(batch, tuple | list) else f"the type {type(batch).__name__}"
        raise TypeError(f"the mini-batch has {found}; it must be (inputs, targets)")
    inputs, targets = batch
    return inputs, targets


def _positive(num_microbatches: int) -> int:
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches!r}; it must be a whole number of at least 1")
    return num_microbatches


def _one_of(value: str, choices: Any, what: str) -> Any:
    names = [str(choice) for choice in choices]
    if value not in names:
        raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(names)}")
    return choices(value) if isinstance(choices, type) else value
