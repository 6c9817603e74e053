"""Runs tasks: the stages of this process at work on a mini-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from gpipe.pipeline.job.watch import Activity
from gpipe.pipeline.loss import MiniBatchLoss
from gpipe.pipeline.microbatch import Payload, merge, microbatch_sizes, split
from gpipe.pipeline.probe import Probe
from gpipe.pipeline.schedule import (
    Kind,
    Rematerialize,
    Schedule,
    ScheduleFunction,
    Task,
    count_stages,
    inference,
    sequential,
)
from gpipe.pipeline.stage import Stage
from gpipe.pipeline.timeline import Clock
from gpipe.pipeline.transfer import MiniBatch, Transfer


class Plan(NamedTuple):
    """What this process does in a training step.

    Attributes:
        tasks: of its stages, in order, and whether each micro-batch keeps the graph of its forward.
        final_micro_batches: of each of its stages, the one whose backward comes last.
    """

    tasks: tuple[tuple[Task, bool], ...]
    final_micro_batches: dict[int, int]


class Executor:
    """Executes the tasks of this process's stages, in the schedule's order.

    Args:
        stages: of this process, by index: those of one device, or all.
        num_stages: K.
        transfer: to and from the other stages.
        check: called before each task; may raise to end the step.
        stages_per_device: more than 1 where the schedule is interleaved.
        activity: keeps what is under way.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        num_stages: int,
        transfer: Transfer,
        check: Callable[[], None] | None = None,
        stages_per_device: int = 1,
        activity: Activity | None = None,
    ) -> None:
        self._stages = stages
        self._activity = activity or Activity()
        self._num_stages, self._stages_per_device = num_stages, stages_per_device
        self._transfer = transfer
        self._check = check or _nothing
        self._parts: list[Any] = []  # the inputs of each micro-batch, in the first stage

    def start(self, inputs: Any, batch_size: int | None, num_microbatches: int, *, training: bool) -> MiniBatch:
        """Cut the mini-batch, or learn from the stage before how it was cut.

        Args:
            inputs: of the mini-batch, where this process holds the first stage.
            batch_size: their number, likewise; None elsewhere.
            num_microbatches: M.
            training: whether gradients will come back.
        """
        batch = None
        if batch_size is not None:
            sizes = microbatch_sizes(batch_size, num_microbatches)
            self._parts = split(inputs, sizes)
            batch = MiniBatch(batch_size, len(sizes))
        return self._transfer.start(batch, training=training)

    def train(self, plan: Plan, step: int, loss: MiniBatchLoss | None, clock: Clock) -> None:
        """Run this process's tasks of a training step; `loss` where it holds the last stage."""
        for stage in self._stages.values():
            is_last = stage.index == self._num_stages - 1
            stage.start_step(step, loss if is_last else None, plan.final_micro_batches[stage.index])
        for task, keep_graph in plan.tasks:
            self._execute(task, clock, keep_graph=keep_graph)
        self._parts = []
        for stage in self._stages.values():
            stage.loss = None  # it holds the targets

    def evaluate(self, num_microbatches: int, layers: nn.ModuleDict) -> Any:
        """Run `layers` forward; return the outputs of the mini-batch where this process holds the last stage."""
        outputs: list[Payload] = []
        schedule = inference(self._num_stages, num_microbatches, self._stages_per_device)
        for task in own_tasks(schedule, tuple(self._stages)):
            self._check()
            stage, micro_batch = self._stages[task.stage], task.micro_batch
            own = {index: layers[str(index)] for index in stage.layers}
            inputs = self._inputs(stage, micro_batch)
            self._activity.start(stage, micro_batch, "evaluation")
            payload = stage.evaluate(micro_batch, inputs, own)
            self._activity.stop()
            if stage.index < self._num_stages - 1:
                self._transfer.send_forward(stage.index, micro_batch, payload)
            else:
                outputs.append(payload)
        self._parts = []
        return merge(outputs) if outputs else None

    def probe(self, num_microbatches: int, step: int, loss: MiniBatchLoss | None, probe: Probe) -> None:
        """Run the forward of training step `step` once more, without a graph, and show `probe` what comes out of it."""
        schedule = inference(self._num_stages, num_microbatches, self._stages_per_device)
        for task in own_tasks(schedule, tuple(self._stages)):
            self._check()
            stage, micro_batch = self._stages[task.stage], task.micro_batch
            stage.step = step
            outputs = stage.probe(micro_batch, self._inputs(stage, micro_batch), probe)
            if stage.index < self._num_stages - 1:
                self._transfer.send_forward(stage.index, micro_batch, outputs)
            else:
                assert loss is not None
                probe.look_at_loss(stage, micro_batch, loss(outputs.value(), micro_batch))
        self._parts = []

    def reset(self) -> None:
        """Drop everything of a step that failed."""
        self._activity.stop()
        self._parts = []
        self._transfer.reset()
        for stage in self._stages.values():
            stage.reset()

    def _execute(self, task: Task, clock: Clock, *, keep_graph: bool) -> None:
        self._check()
        stage, micro_batch = self._stages[task.stage], task.micro_batch
        last = stage.index == self._num_stages - 1
        if task.kind is Kind.FORWARD:
            inputs = self._inputs(stage, micro_batch)
            mark = self._start(task, stage, clock)
            outputs = stage.forward(micro_batch, inputs, keep_graph=keep_graph)
            self._stop(task, stage, clock, mark)
            if not last:
                self._transfer.send_forward(stage.index, micro_batch, outputs)
        elif task.kind is Kind.RECOMPUTE:
            mark = self._start(task, stage, clock)
            stage.recompute(micro_batch)
            self._stop(task, stage, clock, mark)
        else:
            gradients = None if last else self._transfer.receive_backward(stage.index, micro_batch)
            mark = self._start(task, stage, clock)
            input_gradients = stage.backward(micro_batch, gradients)
            self._stop(task, stage, clock, mark)
            if stage.index > 0:
                self._transfer.send_backward(stage.index, micro_batch, input_gradients)

    def _start(self, task: Task, stage: Stage, clock: Clock) -> Any:
        self._activity.start(stage, task.micro_batch, task.kind.value)
        return clock.start(stage.device)

    def _stop(self, task: Task, stage: Stage, clock: Clock, mark: Any) -> None:
        clock.stop(task, stage.device, mark)
        self._activity.stop()

    def _inputs(self, stage: Stage, micro_batch: int) -> Payload:
        if stage.index > 0:
            return self._transfer.receive_forward(stage.index, micro_batch)
        payload = Payload.of(self._parts[micro_batch])
        tensors = [tensor.to(stage.device, non_blocking=True) for tensor in payload.tensors]
        return Payload(tensors, payload.structure, payload.differentiable)


# A step is planned once for each size: behind the first stage, nothing else can be done before the first boundary input
# has arrived, and all stages after it wait for that too.
@functools.lru_cache(maxsize=64)
def make_plan(
    schedule: ScheduleFunction,
    num_stages: int,
    num_microbatches: int,
    rematerialize: Rematerialize,
    stages: tuple[int, ...],
    stages_per_device: int = 1,
) -> Plan:
    """Plan a training step for the process of some stages."""
    found = schedule(num_stages, num_microbatches, rematerialize, stages_per_device)
    tasks = own_tasks(found, stages)
    recomputed = {(task.stage, task.micro_batch) for task in tasks if task.kind is Kind.RECOMPUTE}
    return Plan(
        tuple((task, (task.stage, task.micro_batch) not in recomputed) for task in tasks),
        {task.stage: task.micro_batch for task in tasks if task.kind is Kind.BACKWARD},  # the last one of each counts
    )


def own_tasks(schedule: Schedule, stages: tuple[int, ...]) -> list[Task]:
    """Return the tasks of a process: those of one device, which its first stage has the number of, or all."""
    return sequential(schedule) if len(stages) == count_stages(schedule) else schedule[min(stages)]


def _nothing() -> None:
    """Have no other process to look after."""
