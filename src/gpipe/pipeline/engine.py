"""The pipeline: runs this process's tasks of each step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from gpipe.pipeline import batch_norm
from gpipe.pipeline.checks.loss_function import weight_of
from gpipe.pipeline.checks.recomputation_check import RecomputationCheck
from gpipe.pipeline.checks.refusals import (
    check_numbers,
    refuse_changed_model,
    refuse_embeddings,
    refuse_history,
    refuse_inference_mode,
    refuse_late_parameters,
    refuse_max_norm,
    refuse_model,
    refuse_replaced_layers,
    refuse_scaler,
    refuse_to_shard,
    unpack_mini_batch,
)
from gpipe.pipeline.job.devices import Devices
from gpipe.pipeline.job.errors import FirstNonFinite, LostPeer, NonFiniteError, PipelineError, StepAbandoned
from gpipe.pipeline.job.mesh_job import join_job
from gpipe.pipeline.layers.autocast import step_autocast_cache
from gpipe.pipeline.layers.buffers import find_shared_buffers
from gpipe.pipeline.layers.device_threads import DeviceThreads
from gpipe.pipeline.layers.evaluation_mode import evaluation_mode
from gpipe.pipeline.layers.execution import LayerExecution
from gpipe.pipeline.layers.generators import preserved_generators
from gpipe.pipeline.layers.low_precision import wants_low_precision
from gpipe.pipeline.loss import LossFunction, LossWeight, MiniBatchLoss, add_up
from gpipe.pipeline.measurement.clock import Clock, gather_timeline
from gpipe.pipeline.measurement.step_report import StepReport, measure_peak_memory
from gpipe.pipeline.microbatch import Payload, find_batch_size, microbatch_sizes, split
from gpipe.pipeline.nothing import NOTHING
from gpipe.pipeline.partition import check_partitions, partition_ranges
from gpipe.pipeline.schedule import Kind, ScheduleFunction, Task
from gpipe.pipeline.schedules.choice import (
    StepPlan,
    check_rematerialization,
    choose_schedule,
    name_schedule,
    plan_tasks,
)
from gpipe.pipeline.shared.connection import await_averages, connect_stages
from gpipe.pipeline.shared.tied_parameters import TiedGradients, TiedParameters
from gpipe.pipeline.stage import Stage
from gpipe.pipeline.step_end import moving_statistics
from gpipe.pipeline.step_end.conclusion import Conclusion, Gradients, conclude
from gpipe.pipeline.step_end.gradient_scaler import GradientScaler
from gpipe.pipeline.step_end.outputs import merge
from gpipe.pipeline.transfer import MiniBatch

RunTask = Callable[[Stage, Task, Any], Any]
"""What to do for a task: (stage, task, what it received) -> what it sends."""

Take = Callable[[int, Payload], Any]
"""(a micro-batch's index, its outputs) -> nothing."""

_OUTPUTS = object()  # stands for targets that were not given: return the outputs


class Pipeline(LayerExecution):
    """Trains a sequence of layers, cut into partitions, by pipelined micro-batches (GPipe, section 2).

    Gradients, moving averages and masks do not depend on the number of partitions, on re-materialisation, on whether
    backwards are split, or on whether one process plays all stages or each stage has its own. R replicas of M
    micro-batches have the masks of one pipeline of R x M. GPipe's schedules add up the micro-batches from last to
    first, the others from first to last: between the two, gradients differ by rounding.

    Args:
        layers: the model, a plain sequence. A layer takes what the one before returns: a tensor, or nested tuples,
            lists and dicts of tensors and None. Under autocast, float32 inputs of linear layers, convolutions and
            layers with the attribute `wants_low_precision` are converted to autocast's type before they travel. Layers
            on the meta device get their memory and initial weights here; those of other processes never do. Batch norms
            must have gone through `convert_batch_norm`.
            A parameter that several layers share becomes one copy per layer, in place. All copies get the values of the
            first and, in each step, the sum of all their gradients, so that any optimizer keeps them equal.
        loss: (outputs, targets) -> the mean loss of a micro-batch, a scalar tensor; or (loss, {name: scalar tensor}),
            whose scalars appear in the report.
        partitions: the number of layers of each stage, such as `partition_layers` returns.
        num_microbatches: M, into which each mini-batch is cut; smaller mini-batches make fewer, never empty ones.
        rematerialize: "always", "except_last" or "never": which micro-batches recompute their activations. Or a number
            per stage: how many micro-batches' activations it keeps at once, those that are needed first.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "split_gpipe", "zb_h1" or "zb_v" (`gpipe.pipeline.schedules`);
            or your own function, which returns the tasks of a step as those do. Its tasks are checked before they run.
        stages_per_device: at least 2 in the interleaved schedule, where stage s of K is on device s % P, with P = K /
            stages_per_device; 2 in ZB-V; 1 in the others.
        devices: one per stage, for one process; or that of this process. Default: where the layers are; on a mesh, its
            type.
        mesh: R x P processes with the dimensions ("replica", "stage"); None: this process plays all stages.
        seed: of initial weights (with the layer) and masks (with the step, the micro-batch and the layer).
        loss_weight: targets of a micro-batch -> the weight of its mean loss. Default: what torch's cross entropies
            divide by, targets that are not ignored or their class weights; for other losses the number of examples.
        timeout_seconds: how long a process may be silent before it is named and the step fails.
        synchronize_batch_norm: normalise each micro-batch by its statistics over all R replicas, as if one process had
            the examples of all. Every replica then cuts its mini-batch into as many micro-batches as the replica with
            the smallest, and must use the same batch norms in the same order. Batch norms without moving averages are
            synchronised too; evaluation exchanges nothing. With one replica it changes nothing.
        output_dimension: along which the model's outputs have their examples, to concatenate micro-batches.
        shard_replicas: shard each layer's weights, their gradients and the optimizer's state over the R replicas with
            torch's fully_shard: `parameters()` are this process's shards. Parameters that a replica does not use have
            a gradient of zeros. Not for schedules that split backwards, tied parameters, or layers on the meta device.
            With one replica it changes nothing.
        check_recomputation: compare each layer's recomputed outputs with those of its forward; the first difference is
            an error. For debugging: it waits for the GPU after each layer.
        prepare_inputs: inputs of a micro-batch, on the first stage's device -> what the first layer takes. Images, for
            example, can travel to the GPU as bytes, in a quarter of the time, and be normalised there.

    Attributes:
        layers: this process's layers, under their index in the whole model.
        job: the processes that train together: gathers values, names failures, knows the replicas.
        stages: this process's stages, by index.
        step: the number of finished training steps; set it to resume.
        shards_replicas: whether the replicas shard their weights.

    Raises:
        TypeError, ValueError: a setting is invalid, or does not fit the others; the message says what to change.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        loss: LossFunction,
        partitions: Sequence[int],
        num_microbatches: int = 32,
        *,
        rematerialize: str | Sequence[int] = "always",
        schedule: str | ScheduleFunction = "gpipe",
        stages_per_device: int = 1,
        devices: Devices = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        loss_weight: LossWeight | None = None,
        timeout_seconds: float = 300.0,
        synchronize_batch_norm: bool = False,
        output_dimension: int = 0,
        shard_replicas: bool = False,
        check_recomputation: bool = False,
        prepare_inputs: Callable[[Any], Any] | None = None,
    ) -> None:
        refuse_model(layers, loss, loss_weight, prepare_inputs)
        check_partitions(partitions, len(layers))
        tied = TiedParameters(layers)
        check_numbers(num_microbatches, output_dimension, seed, stages_per_device, timeout_seconds)
        self.num_microbatches, self.partitions = num_microbatches, tuple(partitions)
        self.rematerialize = check_rematerialization(rematerialize, len(partitions))
        self.num_layers, self.num_stages, self.stages_per_device = len(layers), len(partitions), stages_per_device
        self._schedule, self._placement = choose_schedule(
            schedule, self.num_stages, num_microbatches, self.rematerialize, stages_per_device
        )
        if shard_replicas:
            tasks = self._schedule(self.num_stages, num_microbatches, self.rematerialize, stages_per_device)
            refuse_to_shard(layers, name_schedule(schedule), tasks, [first.full_name for first, *_ in tied.groups])
        self._output_dimension = output_dimension
        self.seed, self.step, self.timeout_seconds = seed, 0, timeout_seconds
        self._loss, self._loss_weight, self._prepare_inputs = loss, loss_weight or weight_of(loss), prepare_inputs
        self._is_loss_known = False  # whether the graph of a loss has been checked

        self.job = join_job(mesh, devices, layers, self._placement, timeout_seconds)
        refuse_embeddings(layers, self.job.num_replicas, [copy.full_name for group in tied.groups for copy in group])
        settings = {
            "synchronize_batch_norm": synchronize_batch_norm,
            "shard_replicas": shard_replicas,
            "partitions": list(partitions),
            "num_microbatches": num_microbatches,
            "rematerialize": rematerialize if isinstance(rematerialize, str) else list(rematerialize),
            "schedule": name_schedule(schedule),
            "stages_per_device": stages_per_device,
            "seed": seed,
        }
        # Exchanges in the middle of a step need the same step in all replicas.
        exchanges = synchronize_batch_norm or shard_replicas
        among_replicas = None if exchanges else ["synchronize_batch_norm", "shard_replicas"]
        self.job.connect(lambda: settings | tied.settings(), among_replicas)
        self.shards_replicas = shard_replicas and self.job.num_replicas > 1
        self._given = weakref.ref(layers)  # weak: the layers of other processes are not kept alive here
        self._close = weakref.finalize(self, self.job.close)

        ranges = partition_ranges(partitions)
        owners = [self.job.process_of(k) for k, part in enumerate(ranges) for _ in part]
        lowered = frozenset(i for i, layer in enumerate(layers) if wants_low_precision(layer))
        first = self.job.replica_index * num_microbatches
        shared_buffers = find_shared_buffers(layers)
        with self.job.guard():
            own = tied.build({i: device for k, device in self.job.devices.items() for i in ranges[k]}, seed)
            self._tied = TiedGradients(tied.groups, own, owners, self.job)
            self._own = own
            self._given_layers = {i: layer for i, layer in own.items() if layers[i] is layer}
            self.layers = nn.ModuleDict({str(i): layer for i, layer in own.items()})
            self.stages: Mapping[int, Stage] = {
                k: Stage(k, {i: own[i] for i in ranges[k]}, device, seed, lowered, first, shared_buffers)
                for k, device in self.job.devices.items()
            }
            norms = batch_norm.converted_batch_norms(layers)
            self._synchronizes = synchronize_batch_norm and self.job.num_replicas > 1 and bool(norms)
            connect_stages(
                self.stages, self.layers, self.job, shards=self.shards_replicas, synchronizes=self._synchronizes
            )
            self._gradients = Gradients(self.layers, self._tied, self.job.replicas if self.shards_replicas else None)
        if check_recomputation:
            for stage in self.stages.values():
                stage.recomputation_check = RecomputationCheck()
        self.job.on_failure += [weakref.WeakMethod(stage.reset) for stage in self.stages.values()]

    @property
    def is_first(self) -> bool:
        """Whether this process holds the first stage, and so needs the inputs."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this process holds the last stage, and so needs the targets and sees the outputs."""
        return self.num_stages - 1 in self.stages

    @property
    def num_devices(self) -> int:
        """P, the number of devices that the schedule has work for: K, or fewer where it is interleaved."""
        return self.num_stages // self.stages_per_device

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """The names of the copies of each parameter that several layers of the model share, in layer order."""
        return self._tied.names

    def train_step(
        self,
        batch: tuple[Any, Any],
        *,
        record_timeline: bool = False,
        note: Callable[[], Any] | None = None,
        scaler: GradientScaler | None = None,
        return_outputs: bool = False,
        max_gradient_norm: float | None = None,
    ) -> StepReport:
        """Add the gradients of a mini-batch's loss to the parameters' `.grad`, and move the moving averages once.

        Every process calls it. The parameters themselves are left to an optimizer.

        Args:
            batch: (inputs, targets), each a tensor or a nest of tensors with the examples along the first dimension.
                Only the first stage's process reads the inputs, and only the last stage's the targets.
            record_timeline: whether to collect when each task ran, on all stages.
            note: called at the end of the step. What it returns, of JSON's types, is in this step's report on every
                process of the job, without an exchange of its own.
            scaler: scales the loss for float16. If a gradient is not finite, every process skips the step: no process
                has gradients, no moving average has moved, and `step` stays as it is.
            return_outputs: put the outputs of all micro-batches into the report of the last stage's process.
            max_gradient_norm: clip as `clip_gradients` does, but with the norms that each step computes anyway.

        Raises:
            NonFiniteError: the loss or, without a scaler, a gradient is not finite; on every process. The gradients are
                unusable, no moving average has moved, and `step` stays as it is; another step may follow.
            StepAbandoned: a process was asked to stop while it compiled; on every process, as above.
            TypeError, ValueError: an argument is invalid, or a layer was replaced or added.
            PipelineError: an error in a layer, in the loss or in another process; it says where. With several
                processes, the pipeline cannot be used after any of these three.
        """
        begin = time.perf_counter()
        with self._step():
            inputs, targets = unpack_mini_batch(batch)
            refuse_inference_mode()
            refuse_max_norm(max_gradient_norm)
            refuse_scaler(scaler, self.named_parameters())
            if not self.is_first:  # before it waits for its first boundary input, as all stages after it do too
                self._prepare_stages(scaler)
            mini_batch, parts = self._start(inputs, self._common_num_microbatches(inputs), training=True)
            given = {
                "step": self.step,
                "scaler.scale": None if scaler is None else scaler.scale,
                "max_gradient_norm": max_gradient_norm,
            }
            outputs: dict[int, Payload] | None = {} if return_outputs else None
            loss = self._minibatch_loss(targets, mini_batch, given, outputs) if self.is_last else None
            tasks, recomputed, final = self._plan(self._schedule, mini_batch)
            if self.is_first:  # once its mini-batch is known to be valid
                self._prepare_stages(scaler)
            clock = self._start_clock() if record_timeline else None
            for k, stage in self.stages.items():
                stage.expect(loss if k == self.num_stages - 1 else None, final[k])

            def train(stage: Stage, task: Task, received: Any) -> Payload | None:
                kind, k, micro_batch = task
                if kind is Kind.FORWARD:
                    return stage.forward(micro_batch, received, keep_graph=(k, micro_batch) not in recomputed)
                if kind.makes_gradients:
                    return stage.backward(micro_batch, received, splits=kind is Kind.INPUT_GRADIENTS)
                if kind is Kind.WEIGHT_GRADIENTS:
                    stage.make_weight_gradients(micro_batch)
                else:
                    stage.recompute(micro_batch)
                return None

            with torch.enable_grad():
                self._run(tasks, parts, train, clock, threads=self._device_threads)
            self._is_loss_known = True
            if loss is not None:
                loss.refuse_without_gradient()
            self._finish_gradients()
            if scaler is not None:
                scaler.unscale(self.parameters())
            merged = self._merge(outputs, mini_batch)  # before anything moves: it may fail
            totals, notes, is_skipped, norm = self._conclude(loss, note, given)
            if scaler is not None:
                scaler.update(is_skipped=is_skipped)
            step = self.step
            self._finish_step(is_skipped=is_skipped)
            timeline = gather_timeline(clock, self.job, self.num_devices, self._placement) if clock else None
        return StepReport(
            step=step,
            loss=totals.pop("loss"),
            metrics=totals,
            notes=notes,
            num_examples=mini_batch.num_examples,
            num_microbatches=mini_batch.num_microbatches,
            timeline=timeline,
            step_seconds=time.perf_counter() - begin,
            peak_memory_bytes=measure_peak_memory(set(self.job.devices.values())),
            is_skipped=is_skipped,
            outputs=merged,
            gradient_norm=norm,
        )

    def evaluate(
        self,
        inputs: Any,
        targets: Any = _OUTPUTS,
        *,
        layers: nn.ModuleDict | None = None,
        move_statistics: bool = False,
    ) -> Any:
        """Return the model's outputs for a mini-batch, or its loss, in evaluation mode; every process calls it.

        Args:
            inputs: as for `train_step`, with any number of examples; None outside the first stage.
            targets: as for `train_step`; None outside the last stage. For the outputs, leave it out on every process.
            layers: run these in place of `self.layers`, such as their exponential moving average; with the same keys.
            move_statistics: let batch norms work as in a training step: normalise each micro-batch by its own
                statistics, then move the moving statistics once.

        Returns:
            Without targets, the outputs of all examples in the last stage's process, None in the others. With targets,
            the loss and the metrics by name, over all replicas, on every process; the outputs, which may need much
            memory, are not concatenated.
        """

        def give_outputs(mini_batch: MiniBatch) -> tuple[Take, Callable[[], Any]]:
            outputs: dict[int, Payload] = {}
            return outputs.__setitem__, lambda: self._merge(outputs, mini_batch)

        def give_loss(mini_batch: MiniBatch) -> tuple[Take, Callable[[], Any]]:
            loss = self._minibatch_loss(targets, mini_batch) if self.is_last else None

            def take(micro_batch: int, outputs: Payload) -> None:
                assert loss is not None
                loss(outputs.value(), micro_batch)

            def total() -> dict[str, float]:
                return add_up([*filter(None, self.job.gather_all(loss.totals() if loss else None))])

            return take, total

        return self._evaluate(inputs, give_outputs if targets is _OUTPUTS else give_loss, layers, move_statistics)

    def measure(
        self, inputs: Any, targets: Any, function: Callable[[Any, Any], Any], *, layers: nn.ModuleDict | None = None
    ) -> list[Any] | None:
        """Call a function of (outputs, targets) for each micro-batch, with the outputs of `evaluate`.

        Returns:
            Its result for each micro-batch, in the last stage's process; None in the others. The outputs of the whole
            mini-batch are never in memory at once.
        """

        def give_results(mini_batch: MiniBatch) -> tuple[Take, Callable[[], Any]]:
            parts = split(targets, self._check_targets(targets, mini_batch)) if self.is_last else []
            results: list[Any] = []

            def take(micro_batch: int, outputs: Payload) -> None:
                results.append(function(outputs.value(), parts[micro_batch].value()))

            return take, lambda: results if self.is_last else None

        found: list[Any] | None = self._evaluate(inputs, give_results, layers)
        return found

    def _evaluate(
        self,
        inputs: Any,
        begin: Callable[[MiniBatch], tuple[Take, Callable[[], Any]]],
        layers: nn.ModuleDict | None,
        move_statistics: bool = False,
    ) -> Any:
        """Run the forwards in evaluation mode.

        begin: mini-batch -> (what takes each output in the last stage, what makes the result at the end).
        """
        used, norms = self.layers if layers is None else layers, list[batch_norm.MicroBatchNorm]()
        exchanges = move_statistics or self.shards_replicas
        try:
            with self._step(), ExitStack() as stack:
                given = used.keys() if isinstance(used, nn.ModuleDict) else [type(used).__name__]
                if given != self.layers.keys():
                    raise ValueError(
                        f"the layers to evaluate are {[*given]}; give a ModuleDict of this process's {[*self.layers]}"
                    )
                norms += self.batch_norms(layers) if move_statistics else []
                stack.enter_context(evaluation_mode([used, self._loss], norms))
                num_microbatches = self._common_num_microbatches(inputs) if exchanges else self.num_microbatches
                mini_batch, parts = self._start(inputs, num_microbatches, training=False)
                take, finish = begin(mini_batch)
                own = {k: {index: used[str(index)] for index in stage.layers} for k, stage in self.stages.items()}

                def evaluate(stage: Stage, task: Task, received: Payload) -> Payload:
                    outputs = stage.evaluate(task.micro_batch, received, own[stage.index], moves=move_statistics)
                    if stage.index == self.num_stages - 1:
                        stage.enter_loss(task.micro_batch)
                        take(task.micro_batch, outputs)
                    return outputs

                for k, stage in self.stages.items():
                    stage.start_evaluation(self.step, own[k])
                self._run(self._plan(None, mini_batch)[0], parts, evaluate, doing="evaluation")
                self.job.wait_for_devices()
                if move_statistics:
                    moving_statistics.commit(norms, self.job.replicas)
                return finish()
        finally:
            batch_norm.discard(norms)

    def _merge(self, outputs: Mapping[int, Payload] | None, mini_batch: MiniBatch) -> Any:
        """Concatenate the outputs of the micro-batches, if there are any."""
        sizes = microbatch_sizes(mini_batch.num_examples, mini_batch.num_microbatches)
        return merge([outputs[i] for i in sorted(outputs)], sizes, self._output_dimension) if outputs else None

    def first_non_finite(self, batch: tuple[Any, Any]) -> FirstNonFinite | None:
        """Run the forward of a mini-batch again, as `train_step` did, and find the first number that is not finite.

        Every process calls it, after a NonFiniteError and with the same mini-batch. Nothing is updated.

        Returns:
            The first layer of the model with such an output, over all micro-batches and replicas, or else a loss; None
            if all are finite.
        """
        found: list[FirstNonFinite] = []

        def probe(stage: Stage, task: Task, received: Payload) -> Payload:
            def look(layer: int, name: str, tensors: list[Tensor]) -> None:
                self.job.wait_for_devices()
                if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                    found.append(FirstNonFinite(layer, self.job.replica_index, task.micro_batch, stage.index, name))

            outputs = stage.probe(task.micro_batch, received, look)
            if loss is not None and stage.index == self.num_stages - 1:
                stage.enter_loss(task.micro_batch)
                look(self.num_layers, "the loss", [loss(outputs.value(), task.micro_batch)])
            return outputs

        with self._step():
            inputs, targets = unpack_mini_batch(batch)
            mini_batch, parts = self._start(inputs, self._common_num_microbatches(inputs), training=False)
            loss = self._minibatch_loss(targets, mini_batch) if self.is_last else None
            for stage in self.stages.values():
                stage.start_probe(self.step)
            with torch.enable_grad():
                self._run(self._plan(None, mini_batch)[0], parts, probe)
            self._undo()
            rows = [row for part in self.job.gather_all(sorted(found)[:1]) for row in part]
        return FirstNonFinite(*min(rows)) if rows else None

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield this process's parameters under the names layers.<index in the whole model>.<name>."""
        return self.layers.named_parameters(prefix="layers")

    def batch_norms(self, layers: nn.ModuleDict | None = None) -> list[batch_norm.MicroBatchNorm]:
        """Return this process's batch norms whose moving statistics a training step moves.

        layers: as for `evaluate`; then those in their place.
        """
        trained = batch_norm.converted_batch_norms(self.layers.values())
        found = trained if layers is None else batch_norm.converted_batch_norms(layers.values())
        return [norm for own, norm in zip(trained, found, strict=True) if own.training]

    def parameters(self) -> Iterator[Parameter]:
        """Yield this process's parameters, for an optimizer."""
        return self.layers.parameters()

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; every process calls it.

        Returns:
            The norm before clipping, over the parameters of all stages; bitwise the same for every number of stages.

        Raises:
            NonFiniteError: the norm is not finite; nothing was scaled.
            ValueError: `max_norm` is negative or not a number.
        """
        refuse_max_norm(max_norm)
        with self.job.guard():
            return self._gradients.clip_together(self.job, max_norm, self.step - 1)

    def close(self) -> None:
        """Wait until everything sent has arrived, and end the threads; automatic when the pipeline is released."""
        self._close()
        if self._device_threads is not None:
            self._device_threads.close()
            self._device_threads = None

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Restore generators at the end, convert weights once; on an error, clean up and tell the other processes."""
        converted = step_autocast_cache(is_kept=not self.shards_replicas)
        with self.job.guard(), preserved_generators(self.job.devices.values()), converted:
            refuse_replaced_layers(self.layers, self._own)
            if (given := self._given()) is not None:
                refuse_changed_model(given, self._given_layers, self.num_layers)
            if self._compilation is not None:
                self._compilation.start()
            yield

    def _start(self, inputs: Any, num_microbatches: int, *, training: bool) -> tuple[MiniBatch, list[Payload]]:
        """Cut the mini-batch, or learn from the stage before how it was cut; return it with its parts."""
        if not self.is_first:
            return self.job.transfer.start(None, training=training), []
        if training:
            refuse_history(inputs, "inputs")
        sizes = microbatch_sizes(find_batch_size(inputs, "inputs"), num_microbatches)
        parts = split(inputs, sizes)
        return self.job.transfer.start(MiniBatch(sum(sizes), len(sizes)), training=training), parts

    def _plan(self, schedule: ScheduleFunction | None, batch: MiniBatch) -> StepPlan:
        device = None if len(self.stages) == self.num_stages else self.job.process
        shape = self.num_stages, batch.num_microbatches, self.rematerialize, self.stages_per_device
        return plan_tasks(schedule, *shape, self._placement, device)

    def _run(
        self,
        tasks: Sequence[Task],
        parts: list[Payload],
        work: RunTask,
        clock: Clock | None = None,
        doing: str = "",
        threads: DeviceThreads | None = None,
    ) -> None:
        """Run tasks in order: receive, work, send.

        `parts` are the inputs of each micro-batch, in the first stage. In messages `doing` replaces a task's kind.
        """
        if threads is None:
            for task in tasks:
                self._run_task(task, parts, work, clock, doing or task.kind.words)
            return
        try:
            for stage in self.stages.values():
                stage.seeds_host = False
            threads.run(tasks, lambda task: self._run_task(task, parts, work, clock, doing or task.kind.words))
        finally:
            for stage in self.stages.values():
                stage.seeds_host = True

    # A function of its own, so that what was received and sent is released before the next task.
    def _run_task(self, task: Task, parts: list[Payload], work: RunTask, clock: Clock | None, doing: str) -> None:
        kind, k, micro_batch = task
        stage, job = self.stages[k], self.job
        job.check()
        is_received = k > 0 if kind is Kind.FORWARD else kind.makes_gradients and k < self.num_stages - 1
        received: Any = job.transfer.receive(task) if is_received else None
        job.activity.start(stage.current_layer.describe, micro_batch, doing)
        try:
            if kind is Kind.FORWARD and k == 0:
                received = self._move(parts[micro_batch], stage, micro_batch)
            mark = None if clock is None else clock.start(stage.device)
            with job.replicas.waiting() if self.shards_replicas else NOTHING:
                result = work(stage, task, received)
            if clock is not None:
                clock.stop(task, stage.device, mark)
            job.activity.stop()
            if stage.gpu is not None:
                job.device_work.add(stage.gpu, doing, k, micro_batch)
            if (kind is Kind.FORWARD and k < self.num_stages - 1) or (kind.makes_gradients and k > 0):
                job.transfer.send(task, result)
            if kind is Kind.BACKWARD or kind is Kind.WEIGHT_GRADIENTS:
                stage.finish_gradients(micro_batch)
        except (PipelineError, LostPeer):
            raise
        except Exception as error:
            raise stage.current_layer.locate(error, micro_batch, doing) from error

    def _move(self, inputs: Payload, stage: Stage, micro_batch: int) -> Payload:
        """Return the inputs of a micro-batch on the first stage's device, as the first layer takes them."""
        moved = inputs.to(stage.device)
        if self._prepare_inputs is None:
            return moved
        stage.enter_inputs(micro_batch)
        with torch.no_grad():
            prepared = Payload.of(self._prepare_inputs(moved.value()))
        prepared.find_shared(moved)
        return prepared

    def _prepare_stages(self, scaler: GradientScaler | None) -> None:
        """Prepare what a step needs independently of its mini-batch."""
        if scaler is not None:
            scaler.scale_earlier(self.parameters())  # all: tied parameters set theirs aside next
        self._tied.start_step()
        if self.shards_replicas:
            refuse_late_parameters(self.layers)
        for stage in self.stages.values():
            stage.start_step(self.step)

    def _finish_gradients(self) -> None:
        """Make each gradient that of the whole mini-batch, and call the hooks with it."""
        await_averages(self.stages.values(), self.job)
        with self.job.activity.doing("adding up the gradients of tied parameters"):
            self._tied.finish_step()
        self.job.wait_for_devices()
        with self.job.activity.doing("calling the hooks of parameters"):
            for stage in self.stages.values():
                stage.call_hooks()

    def _common_num_microbatches(self, inputs: Any) -> int:
        """Return M or, where replicas exchange within a step, the largest number up to M that all of them can make."""
        if not (self._synchronizes or self.shards_replicas) or not self.is_first:
            return self.num_microbatches
        sizes: list[int] = self.job.replicas.gather(find_batch_size(inputs, "inputs"))
        return min(self.num_microbatches, *sizes)

    def _check_targets(self, targets: Any, mini_batch: MiniBatch) -> list[int]:
        """Refuse targets that do not fit the inputs; return the examples of each micro-batch."""
        if (found := find_batch_size(targets, "targets")) != mini_batch.num_examples:
            raise ValueError(
                f"the mini-batch has {mini_batch.num_examples} inputs and {found} targets; give as many of both, and "
                "every process the same mini-batch"
            )
        refuse_history(targets, "targets")
        return microbatch_sizes(mini_batch.num_examples, mini_batch.num_microbatches)

    def _minibatch_loss(
        self,
        targets: Any,
        mini_batch: MiniBatch,
        given: Mapping[str, Any] | None = None,
        outputs: dict[int, Payload] | None = None,
    ) -> MiniBatchLoss:
        sizes = self._check_targets(targets, mini_batch)
        device = self.stages[self.num_stages - 1].device
        loss = MiniBatchLoss(
            self._loss, self._loss_weight, targets, sizes, device, self.job.replicas, given, outputs,
            shards_replicas=self.shards_replicas,
        )  # fmt: skip
        if given is not None and not self._is_loss_known:
            loss.known = list(self.parameters())
        return loss

    def _conclude(
        self, loss: MiniBatchLoss | None, note: Callable[[], Any] | None, given: Mapping[str, Any]
    ) -> Conclusion:
        """Agree with all processes on the outcome of the step; undo it if its gradients do not count."""
        is_abandoned = self._compilation is not None and self._compilation.is_abandoned
        try:
            found = conclude(
                self.job, self._gradients, loss, given, self.num_stages - 1, note=note, is_abandoned=is_abandoned
            )
        except (NonFiniteError, StepAbandoned):
            self._undo()
            raise
        if found.is_skipped:
            self._undo()
        return found

    def _finish_step(self, *, is_skipped: bool) -> None:
        if not is_skipped:
            norms = [norm for stage in self.stages.values() for norm in stage.batch_norms]
            moving_statistics.commit(norms, self.job.replicas)
            self.step += 1
        for stage in self.stages.values():
            stage.finish_step()

    def _undo(self) -> None:
        for stage in self.stages.values():
            stage.undo_step()

    def _start_clock(self) -> Clock:
        self.job.wait_for_devices()  # a GPU's clock begins when its stream gets there
        return Clock(self.job.devices.values())
