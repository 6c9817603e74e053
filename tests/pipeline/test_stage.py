"""A stage runs its layers as the schedule says, and holds nothing longer than its use.

The layers here leave values as they are, and the gradient that reaches them is the target. Inputs and targets are the
number of the micro-batch, so every event says what it belongs to.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.job.job import Job
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.schedule import Kind, Rematerialize, Task, sequential
from gpipe.pipeline.schedule import gpipe as gpipe_schedule
from gpipe.pipeline.transfer import LocalTransfer

MODES = ("always", "except_last", "never")
PARTITIONS = ((6,), (3, 3), (2, 2, 2), (1, 2, 1, 2))
NUM_MICROBATCHES = 4


class Scale(nn.Module):
    """Multiplies by 1, and needs its input for the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Event(NamedTuple):
    """What a layer did: "run" without a graph that keeps its input, "graph" with one, or "backward"."""

    what: str
    layer: int
    micro_batch: int


@dataclass
class Record:
    """What happened, and which layers' outputs and gradients had memory at each moment."""

    events: list[Event] = field(default_factory=list)
    alive: list[set[Event]] = field(default_factory=list)
    memory: list[tuple[Event, StorageWeakRef]] = field(default_factory=list)
    afterwards: set[Event] = field(default_factory=set)
    num_examples: int = 2 * NUM_MICROBATCHES

    def note(self, event: Event, tensor: Tensor) -> None:
        """Note an event that produced a tensor."""
        self.memory.append((event, StorageWeakRef(tensor.untyped_storage())))
        self.events.append(event)
        self.alive.append(self.still_alive())

    def still_alive(self) -> set[Event]:
        """Return the events whose tensors have memory now."""
        return {event for event, memory in self.memory if not memory.expired()}

    def watch(self, index: int, layer: nn.Module) -> None:
        """Note what a layer does from now on."""

        def ran(_: nn.Module, args: Any, output: Tensor) -> None:
            micro_batch = int(output.detach()[0, 0])
            self.note(Event("graph" if keeps_input(output) else "run", index, micro_batch), output)
            if keeps_input(output):
                size = self.num_examples
                output.register_hook(lambda g: self.note(Event("backward", index, round(float(g[0, 0]) * size)), g))

        layer.register_forward_hook(ran)


def keeps_input(output: Tensor) -> bool:
    """Return whether the graph of a `Scale` has what its backward needs."""
    try:
        return output.requires_grad and output.grad_fn._saved_self is not None
    except RuntimeError:  # dropped
        return False


def dot(outputs: Tensor, targets: Tensor) -> Tensor:
    """Make the targets the gradient of the outputs."""
    return (outputs * targets).sum() / len(outputs)


def batch(num_microbatches: int = NUM_MICROBATCHES) -> tuple[Tensor, Tensor]:
    """Return two examples per micro-batch, which hold its number."""
    numbers = torch.arange(num_microbatches).repeat_interleave(2).float()[:, None].expand(-1, 3)
    return numbers.clone(), numbers.clone()


@functools.cache  # several tests look at the same step
def record_step(partitions: tuple[int, ...], mode: str) -> Record:
    """Run one training step under observation, without the garbage collector's help."""
    layers = nn.Sequential(*(Scale() for _ in range(sum(partitions))))
    record = Record()
    for index, layer in enumerate(layers):
        record.watch(index, layer)
    pipeline = gpipe.Pipeline(layers, dot, partitions, NUM_MICROBATCHES, rematerialize=mode)
    with without_garbage_collection():
        pipeline.train_step(batch())
        record.afterwards = record.still_alive()
    return record


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ranges(partitions: Sequence[int]) -> list[range]:
    return [range(sum(partitions[:k]), sum(partitions[: k + 1])) for k in range(len(partitions))]


every_cut_and_mode = pytest.mark.parametrize(("partitions", "mode"), list(itertools.product(PARTITIONS, MODES)))


@every_cut_and_mode
def test_layers_run_in_the_order_of_the_schedule(partitions: tuple[int, ...], mode: str) -> None:
    schedule = gpipe_schedule(len(partitions), NUM_MICROBATCHES, Rematerialize(mode))
    recomputed = {(t.stage, t.micro_batch) for tasks in schedule for t in tasks if t.kind is Kind.RECOMPUTE}
    expected: list[Event] = []
    for kind, stage, micro_batch in sequential(schedule):
        layers = ranges(partitions)[stage]
        if kind is Kind.BACKWARD:
            expected += [Event("backward", layer, micro_batch) for layer in reversed(layers)]
        else:
            without_graph = kind is Kind.FORWARD and (stage, micro_batch) in recomputed
            expected += [Event("run" if without_graph else "graph", layer, micro_batch) for layer in layers]
    assert record_step(partitions, mode).events == expected


@pytest.mark.parametrize(("mode", "count"), [("never", 4), ("except_last", 7), ("always", 8)])  # M, 2M - 1, 2M
@pytest.mark.parametrize("partitions", PARTITIONS)
def test_every_layer_of_every_stage_runs_as_often_as_the_mode_asks(
    partitions: tuple[int, ...], mode: str, count: int
) -> None:
    events = record_step(partitions, mode).events
    for layer in range(6):
        assert sum(event.layer == layer and event.what != "backward" for event in events) == count


@every_cut_and_mode
def test_after_a_step_nothing_of_it_is_alive(partitions: tuple[int, ...], mode: str) -> None:
    assert record_step(partitions, mode).afterwards == set()


@every_cut_and_mode
def test_a_run_without_a_graph_holds_one_layers_input_and_output_beside_the_boundaries(
    partitions: list[int], mode: str
) -> None:
    record = record_step(partitions, mode)
    boundaries = {stage[-1] for stage in ranges(partitions)}
    for event, alive in zip(record.events, record.alive, strict=True):
        inner = {other for other in alive if other.what == "run" and other.layer not in boundaries}
        near = {event, event._replace(layer=event.layer - 1)} if event.what == "run" else set()
        assert inner <= near, event


@every_cut_and_mode
def test_a_boundary_input_is_let_go_when_its_backward_has_run(partitions: tuple[int, ...], mode: str) -> None:
    record = record_step(partitions, mode)
    for boundary in [stage[-1] for stage in ranges(partitions)][:-1]:
        for event, alive in zip(record.events, record.alive, strict=True):
            held = {other.micro_batch for other in alive if other.layer == boundary and other.what != "backward"}
            if event.what == "backward" and event.layer == boundary + 1:  # of the stage after it
                assert held == set(range(event.micro_batch + 1)), event
            assert len(held) <= NUM_MICROBATCHES


@pytest.mark.parametrize("partitions", PARTITIONS)
def test_with_recomputation_one_process_holds_the_graph_of_one_micro_batch_in_one_stage(
    partitions: tuple[int, ...],
) -> None:
    record = record_step(partitions, "always")
    stage_of = {layer: k for k, stage in enumerate(ranges(partitions)) for layer in stage}
    for event, alive in zip(record.events, record.alive, strict=True):
        graphs = {(stage_of[other.layer], other.micro_batch) for other in alive if other.what == "graph"}
        assert graphs <= {(stage_of[event.layer], event.micro_batch)}, event


@every_cut_and_mode
def test_a_graph_is_let_go_when_its_backward_has_run(partitions: tuple[int, ...], mode: str) -> None:
    record = record_step(partitions, mode)
    for event, alive in zip(record.events, record.alive, strict=True):
        if event.what == "backward":
            same_layer = {other.micro_batch for other in alive if other.layer == event.layer and other.what == "graph"}
            assert max(same_layer, default=0) <= event.micro_batch, event


@every_cut_and_mode
def test_gradients_are_let_go_when_they_have_been_used(partitions: tuple[int, ...], mode: str) -> None:
    record = record_step(partitions, mode)
    for event, alive in zip(record.events, record.alive, strict=True):
        gradients = {other for other in alive if other.what == "backward" and other.layer == event.layer}
        assert gradients <= {event}, event


@pytest.mark.parametrize("mode", MODES)
def test_the_mini_batch_is_let_go_after_training(mode: str) -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(Scale(), Scale()), dot, [1, 1], 2, rematerialize=mode)
    inputs, targets = batch()
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (inputs, targets)]
    with without_garbage_collection():
        pipeline.train_step((inputs, targets))
        del inputs, targets
        assert [reference.expired() for reference in memory] == [True, True]


def test_the_mini_batch_and_the_outputs_are_let_go_after_evaluation() -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(Scale(), Scale()), dot, [1, 1], 2)
    inputs, _ = batch()
    with without_garbage_collection():
        outputs = pipeline.evaluate(inputs)
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (inputs, outputs)]
        del inputs, outputs
        assert [reference.expired() for reference in memory] == [True, True]


@pytest.mark.parametrize("mode", MODES)
def test_after_a_step_that_failed_nothing_of_it_is_alive(mode: str) -> None:
    def fails_in_the_middle(outputs: Tensor, targets: Tensor) -> Tensor:
        if int(targets[0, 0]) == 2:
            raise OSError
        return dot(outputs, targets)

    layers = nn.Sequential(Scale(), Scale(), Scale())
    record = Record()
    for index, layer in enumerate(layers):
        record.watch(index, layer)
    pipeline = gpipe.Pipeline(layers, fails_in_the_middle, [1, 1, 1], NUM_MICROBATCHES, rematerialize=mode)
    inputs, targets = batch()
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (inputs, targets)]
    with pytest.raises(gpipe.PipelineError):
        pipeline.train_step((inputs, targets))
    del inputs, targets
    gc.collect()  # the exception's traceback held the step's frames
    assert record.still_alive() == set()
    assert all(reference.expired() for reference in memory)


class LoggedTransfer(LocalTransfer):
    """Carries payloads, and notes when each is asked for; plays the stage behind the first."""

    def __init__(self, log: list[str]) -> None:
        super().__init__([torch.device("cpu")] * 2)
        self.log = log

    def receive(self, task: Task) -> Payload:
        self.log.append(f"ask {task.micro_batch}")
        super().send(task._replace(stage=task.stage + 1), Payload.of((torch.ones(2, 3),)))
        return super().receive(task)


class FirstOfTwo(Job):
    """The process of the first of two stages; the other one is made up."""

    def __init__(self, log: list[str]) -> None:
        super().__init__({0: torch.device("cpu")}, timeout_seconds=10.0)
        self.transfer = LoggedTransfer(log)

    def gather(self, value: Any) -> list[Any]:
        other = {"totals": {"loss": 0.0}, "fault": [], "norms": [], "note": [None, False]}
        return [value, value | other]


def test_a_stage_recomputes_before_it_asks_for_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, log = Scale(), []
    layer.register_forward_hook(lambda _, args, output: log.append(f"run {int(output.detach()[0, 0])}"))
    monkeypatch.setattr("gpipe.pipeline.engine.join_job", lambda *_: FirstOfTwo(log))
    pipeline = gpipe.Pipeline(nn.Sequential(layer, Scale()), dot, [1, 1], 3)
    pipeline.train_step((batch(3)[0], None))
    assert log == ["run 0", "run 1", "run 2", "run 2", "ask 2", "run 1", "ask 1", "run 0", "ask 0"]
    assert not pipeline.stages[0]._kept


class AddOne(nn.Module):
    """Changes its input in place, through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        x.view(-1).add_(1)
        return x


@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), AddOne()])
def test_a_layer_that_changes_the_stored_input_in_place_is_named(mode: str, stage: int, layer: nn.Module) -> None:
    layers = nn.Sequential(Scale(), Scale(), Scale(), Scale())
    layers[2 * stage] = nn.Sequential(nn.Flatten(), layer)
    pipeline = gpipe.Pipeline(layers, dot, [2, 2], NUM_MICROBATCHES, rematerialize=mode)
    message = (
        rf"^stage {stage}, micro-batch 0, layer {2 * stage} \(Sequential\), forward: ValueError: the layer changed "
        r"the stage's stored input in place, .*; use the layer's out-of-place form .* or rematerialize='never'$"
    )
    with pytest.raises(gpipe.PipelineError, match=message):
        pipeline.train_step(batch())


def test_a_later_layer_that_changes_the_stored_input_is_named_itself() -> None:
    layers = nn.Sequential(nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True), Scale())
    pipeline = gpipe.Pipeline(layers, dot, [4], 2)
    with pytest.raises(gpipe.PipelineError, match=r"^stage 0, micro-batch 0, layer 2 \(ReLU\), forward:"):
        pipeline.train_step(batch())


def inplace_model(*, inplace: bool) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace), nn.Linear(4, 4), nn.ReLU(inplace), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("partitions", "mode", "num_microbatches"),
    [
        ([1, 4], "never", 3),  # the first layer of stage 1 changes its input, which nobody needs again
        ([1, 2, 2], "never", 3),
        ([1, 4], "except_last", 1),
        ([2, 3], "always", 3),  # in the middle of a stage it disturbs nothing
        ([4, 1], "always", 3),
    ],
)
def test_changes_in_place_that_disturb_nothing_are_allowed(
    partitions: list[int], mode: str, num_microbatches: int
) -> None:
    gradients = []
    for inplace in (True, False):
        layers = inplace_model(inplace=inplace)
        pipeline = gpipe.Pipeline(layers, dot, partitions, num_microbatches, rematerialize=mode)
        pipeline.train_step((torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.ones(6, 3)))
        gradients.append([parameter.grad for parameter in layers.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


class Shift(nn.Module):
    """Adds a parameter to a view of which autograd passes on the gradient as it is, if there is one example."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.view(1, 3)


@pytest.mark.parametrize("partitions", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_gradients_that_autograd_leaves_in_one_memory_do_not_change_each_other(
    schedule: str, partitions: list[int]
) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Shift(), Shift(), nn.Linear(3, 3)).double()
    plain = copy.deepcopy(layers)
    pipeline = gpipe.Pipeline(layers, F.mse_loss, partitions, 4, schedule=schedule)
    inputs, targets = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    for _ in range(2):
        pipeline.train_step((inputs, targets))
    (2 * F.mse_loss(plain(inputs), targets)).backward()
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-12)


class Look(nn.Module):
    """Looks its input up as a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(torch.arange(2), x, sparse=True) * self.weight


def test_a_sparse_gradient_of_a_boundary_is_refused_with_the_remedy() -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(3, 3), Look()), lambda outputs, _: outputs.sum(), [1, 1], 1)
    with pytest.raises(gpipe.PipelineError, match=r"is a tensor of layout torch.sparse_coo; only dense tensors travel"):
        pipeline.train_step((torch.ones(4, 3), torch.ones(4)))
