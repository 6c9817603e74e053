"""Whatever crosses the boundary between two processes arrives as it was sent, and is released."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import gpipe
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.schedule import SCHEDULES, Rematerialize, dependencies
from gpipe.pipeline.timeline import Event, Timeline
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")


def stages(num_stages: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_stages,), mesh_dim_names=("stage",))


def images(num_examples: int, size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(num_examples, 3, size, size, generator=torch.Generator().manual_seed(seed))


# Payloads of every kind, made and looked at by layers of two stages.


class Make(nn.Module):
    """Makes a tensor of every kind from images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = x * self.weight
        n = len(x)
        complex_ = torch.complex(x, x * 2)
        return {
            "boolean": x > 0,
            "integer": torch.arange(n),
            "bytes": torch.arange(n, dtype=torch.uint8),
            "half": x.half(),
            "bfloat16": x.bfloat16(),
            "double": x.double(),
            "complex": complex_,
            "conjugate": complex_.conj(),  # a lazy one: the memory is not conjugated
            "negative": complex_.conj().imag,  # and not negated
            "empty": x[:0],
            "empty integers": torch.empty(0, n, dtype=torch.int32),
            "without dimensions": x.sum(),
            "channels last": x.contiguous(memory_format=torch.channels_last),
            "transposed": x.transpose(1, 3),
            "expanded": x.mean((1, 3), keepdim=True).expand_as(x),
            "expanded with holes": x[:, :1, :, :1].expand_as(x),
            "expanded and conjugate": complex_.mean((1, 3), keepdim=True).expand_as(x).conj(),
            "size 1 with a stride": x[0].flatten().as_strided((n, 1, 4, 1), (4, 999, 1, 77)),
            "with holes": x[:, ::2, :, ::3],
            "with an offset": x.flatten()[1:],
            "overlapping": x.flatten().unfold(0, 4, 2),
            "parameter": self.weight,
            "without gradient": x.detach(),
            "unused": x + 1,
            "nested": [(x, None), {"again": x}, []],
        }


class Look(nn.Module):
    """Notes what arrives; its result depends on all of it but one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, payload: dict[str, Any]) -> Tensor:
        self.seen.append(describe(payload))
        floating = {key: value for key, value in payload.items() if isinstance(value, Tensor) and value.dtype.is_signed}
        total = torch.zeros(len(payload["boolean"]))
        for position, (key, value) in enumerate(floating.items()):
            if key != "unused":
                value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
                total = total + value.float().sum() / 100 * (position + 1)
        first, second = payload["nested"][0][0], payload["nested"][1]["again"]
        assert first is second, "one tensor in two places has become two"
        return total + (first * second).mean((1, 2, 3))


def describe(value: Any) -> Any:
    """Return type, layout and values of all tensors of a nest."""
    if isinstance(value, Tensor):
        whole = value.detach().resolve_conj().resolve_neg()
        exact = whole.to(torch.complex128) if whole.is_complex() else whole.double()
        return str(value.dtype), tuple(value.shape), exact.numpy().tolist()
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [describe(item) for item in value]
    return value


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).mean()


def exchange_every_kind(rank: int, mode: str) -> tuple[Any, list[float], float | None, list[float] | None]:
    pipeline = gpipe.Pipeline(
        nn.Sequential(Make(), Look()), mean_output, [1, 1], 2, rematerialize=mode, mesh=stages(2), timeout_seconds=10
    )
    losses = [pipeline.train_step((images(5), torch.ones(5))).loss for _ in range(2)]
    outputs = pipeline.evaluate(images(5))
    pipeline.close()
    gradient = [float(parameter.grad) for parameter in pipeline.parameters() if parameter.grad is not None]
    seen = pipeline.layers["1"].seen if rank == 1 else None
    return seen, losses, gradient[0] if gradient else None, None if outputs is None else outputs.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_of_any_kind_arrives_as_it_was_made(mode: str, processes: ProcessPool) -> None:
    (_, losses, gradient, nothing), (seen, *_, outputs) = processes.run(2, exchange_every_kind, mode)
    make, look = Make(), Look()
    parts = images(5).split([3, 2])
    sent = [describe(make(part)) for part in parts]
    recomputed = {"always": [sent[1], sent[0]], "except_last": [sent[0]], "never": []}[mode]
    assert seen == 2 * [*sent, *recomputed] + sent
    values = [look(make(part)) for part in parts]
    loss = sum(value.sum() for value in values) / 5
    loss.backward()
    assert losses == pytest.approx(2 * [loss.item()], rel=1e-5)
    assert gradient == pytest.approx(2 * float(make.weight.grad), rel=1e-5)
    assert nothing is None and outputs == pytest.approx(torch.cat(values).tolist(), rel=1e-5)


STRIDED = (
    "channels last",
    "transposed",
    "expanded",
    "expanded with holes",
    "with holes",
    "size 1 with a stride",
    "without dimensions",
)


class NoteStrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strides: list[tuple[int, ...]] = []

    def forward(self, payload: dict[str, Any]) -> Tensor:
        self.strides += [payload[key].stride() for key in STRIDED]
        return payload["nested"][0][0]


def note_strides(rank: int) -> list[tuple[int, ...]]:
    layers = nn.Sequential(Make(), NoteStrides())
    pipeline = gpipe.Pipeline(layers, mean_output, [1, 1], 1, mesh=stages(2), timeout_seconds=10)
    pipeline.evaluate(images(2))
    pipeline.close()
    return layers[1].strides


def test_a_tensor_lies_in_memory_as_it_did(processes: ProcessPool) -> None:
    made = Make()(images(2))
    assert processes.run(2, note_strides)[1] == [made[key].stride() for key in STRIDED]


class Many(nn.Module):
    """Nests a tensor so deeply and widely that its description is longer than any fixed message."""

    def forward(self, x: Tensor) -> Any:
        return {f"a rather long name for number {i}": [(x + i,), {"nothing": None}] for i in range(100)}


class Sum(nn.Module):
    def forward(self, payload: Any) -> Tensor:
        return sum(item[0][0] for item in payload.values()).mean((1, 2, 3))


def train_many(rank: int) -> tuple[list[float], Any]:
    scale = nn.Conv2d(3, 3, 1)
    nn.init.constant_(scale.weight, 0.1)
    nn.init.zeros_(scale.bias)
    layers = nn.Sequential(scale, Many(), Sum())
    pipeline = gpipe.Pipeline(layers, mean_output, [2, 1], 3, mesh=stages(2), timeout_seconds=10)
    losses = [pipeline.train_step((images(5), torch.ones(5))).loss for _ in range(2)]
    pipeline.close()
    return losses, None if rank else scale.weight.grad.flatten().tolist()


def test_a_description_may_be_longer_than_any_message(processes: ProcessPool) -> None:
    (losses, gradient), _ = processes.run(2, train_many)
    weight = torch.full((3, 3, 1, 1), 0.1, requires_grad=True)
    outputs = Sum()(Many()(nn.functional.conv2d(images(5), weight)))
    (2 * outputs.mean()).backward()
    assert losses == pytest.approx(2 * [outputs.mean().item()], rel=1e-5)
    assert gradient == pytest.approx(weight.grad.flatten().tolist(), rel=1e-4)


# Steps of every size, one after the other, against one process that plays all stages.


@dataclass(frozen=True)
class Call:
    """One call of the pipeline: training or evaluation on so many images of so many pixels."""

    train: bool
    num_examples: int
    size: int = 4


CALLS = (
    Call(train=False, num_examples=3),  # before any training
    Call(train=True, num_examples=4),
    Call(train=True, num_examples=9),  # a larger mini-batch
    Call(train=False, num_examples=11),  # larger than any in training
    Call(train=True, num_examples=9),
    Call(train=True, num_examples=2, size=7),  # fewer than micro-batches, other shapes
    Call(train=True, num_examples=1, size=3),
    Call(train=False, num_examples=1),
    Call(train=True, num_examples=12, size=5),
    Call(train=True, num_examples=7),  # the last mini-batch of an epoch
)


class Pool(nn.Module):
    """Passes on what depends on the size of the image, and on the number of those that are bright."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[x.mean((1, 2, 3)) > 0]


class Unpool(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, bright = pair
        return x.mean((2, 3)) + bright.sum()


def mixed_layers() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1), Pool(), Unpool(), nn.Dropout(0.3), nn.Linear(3, 4), nn.Linear(4, 1)
        )


def make_calls(
    rank: int, partitions: tuple[int, ...], mode: str, schedule: str = "gpipe", stages_per_device: int = 1
) -> list[Any]:
    """Make all calls; return the loss or the outputs of each, and the gradients after it."""
    mesh = stages(len(partitions) // stages_per_device) if rank >= 0 else None
    pipeline = gpipe.Pipeline(
        mixed_layers(), mean_output, partitions, 4, rematerialize=mode, schedule=schedule,
        stages_per_device=stages_per_device, mesh=mesh, timeout_seconds=10,
    )  # fmt: skip
    results: list[Any] = []
    for number, call in enumerate(CALLS):
        inputs = images(call.num_examples, call.size, number) if pipeline.is_first else None
        if call.train:
            targets = torch.ones(call.num_examples, 1) if pipeline.is_last else None
            loss = pipeline.train_step((inputs, targets)).loss
            results.append((loss, {name: p.grad.numpy().copy() for name, p in pipeline.named_parameters()}))
        else:
            outputs = pipeline.evaluate(inputs)
            results.append((None if outputs is None else outputs.tolist(), {}))
    pipeline.close()
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("partitions", [(3, 3), (2, 1, 3), (1, 1, 1, 3)], ids=str)
def test_sizes_may_change_from_call_to_call(partitions: tuple[int, ...], mode: str, processes: ProcessPool) -> None:
    expected = make_calls(-1, (6,), mode)
    assert_same_results(processes.run(len(partitions), make_calls, partitions, mode), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("schedule", "partitions", "stages_per_device"),
    [
        ("1f1b", (1, 1, 1, 3), 1),
        ("interleaved_1f1b", (1, 1, 1, 3), 2),
        ("interleaved_1f1b", (1, 1, 1, 1, 1, 1), 2),
        ("interleaved_1f1b", (3, 3), 2),  # one process has all stages
        ("zb_h1", (1, 1, 1, 3), 1),
        ("zb_v", (1, 1, 1, 3), 2),
        ("zb_v", (1, 1, 1, 1, 1, 1), 2),
        ("zb_v", (3, 3), 2),
    ],
)
def test_sizes_may_change_under_every_schedule(
    schedule: str, partitions: tuple[int, ...], stages_per_device: int, mode: str, processes: ProcessPool
) -> None:
    expected = make_calls(-1, (6,), mode, "1f1b")
    num_devices = len(partitions) // stages_per_device
    found = processes.run(num_devices, make_calls, partitions, mode, schedule, stages_per_device)
    assert_same_results(found, expected)


def assert_same_results(found: list[list[Any]], expected: list[Any]) -> None:
    for call, answers, (oracle, _) in zip(CALLS, zip(*found, strict=True), expected, strict=True):
        values = [value for value, _ in answers]
        assert oracle in values and all(value in (oracle, None) for value in values), f"{call}: {values}"
    for rank, results in enumerate(found):
        for call, (_, gradients), (_, all_gradients) in zip(CALLS, results, expected, strict=True):
            for name, gradient in gradients.items():
                assert np.array_equal(gradient, all_gradients[name]), f"rank {rank}, {call}, {name}"


# What each process must be given, and what it sees.


def count_losses(rank: int) -> tuple[int, list[bool]]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_output(outputs, targets)

    pipeline = gpipe.Pipeline(mixed_layers(), loss, (2, 2, 2), 4, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4) if rank == 0 else None, torch.ones(4, 1) if rank == 2 else None))
    outputs = pipeline.evaluate(images(4) if rank == 0 else None)
    pipeline.close()
    return calls, [pipeline.is_first, pipeline.is_last, outputs is not None]


def test_only_the_last_stage_sees_outputs_and_only_the_ends_need_data(processes: ProcessPool) -> None:
    assert processes.run(3, count_losses) == [
        (0, [True, False, False]),
        (0, [False, False, False]),
        (4, [False, True, True]),  # the recomputations; a forward that is not kept needs no loss
    ]


# The timeline.


def record_timeline(rank: int, mode: str, schedule: str, stages_per_device: int) -> list[list[Any]]:
    num_stages = 3 * stages_per_device
    pipeline = gpipe.Pipeline(
        mixed_layers(), mean_output, [6 // num_stages] * num_stages, 4, rematerialize=mode, schedule=schedule,
        stages_per_device=stages_per_device, mesh=stages(3), timeout_seconds=10,
    )  # fmt: skip
    timeline = pipeline.train_step((images(4), torch.ones(4, 1)), record_timeline=True).timeline
    pipeline.close()
    assert timeline is not None and timeline.num_devices == 3
    return timeline.to_json()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "stages_per_device"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("split_gpipe", 1), ("zb_h1", 1), ("zb_v", 2)],
)
def test_a_timeline_has_every_task_once_in_an_order_that_the_schedule_allows(
    name: str, stages_per_device: int, mode: str, processes: ProcessPool
) -> None:
    first, *others = processes.run(3, record_timeline, mode, name, stages_per_device)
    assert all(rows == first for rows in others), "the processes disagree about the step"
    events = {event.task: event for event in Timeline.from_json(first, 3).events}
    schedule = SCHEDULES[name](3 * stages_per_device, 4, Rematerialize(mode), stages_per_device)
    by_start = sorted(events.values(), key=lambda event: event.start)
    for tasks in schedule:
        own = {task.stage for task in tasks}
        assert [event.task for event in by_start if event.task.stage in own] == tasks
    assert len(first) == len(events)
    assert min(event.start for event in by_start) == 0
    for event in by_start:
        assert event.start <= event.end
        for needed in dependencies(event.task, 3 * stages_per_device):
            assert _ends_before(events[needed], event), f"{event.task} began before {needed} was done"


def _ends_before(first: Event, second: Event) -> bool:
    return first.end <= second.start


# Memory.


class Track(nn.Module):
    """Keeps weak references to the memory of what a layer gets and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.sent: list[StorageWeakRef] = []
        self.received: list[StorageWeakRef] = []
        self.most_received = 0
        self.all_arrived: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.received.append(StorageWeakRef(x.untyped_storage()))
        self.most_received = max(self.most_received, alive(self.received))
        if gpipe.is_recomputing() and len(self.all_arrived) < 1 and len(self.sent) > 4:
            self.all_arrived.append(eventually_expired(self.sent[:4]))
        y = x * self.scale
        self.sent.append(StorageWeakRef(y.untyped_storage()))
        return y


def alive(references: list[StorageWeakRef]) -> int:
    return len({reference.cdata for reference in references if not reference.expired()})


def eventually_expired(references: list[StorageWeakRef]) -> bool:
    """Return whether all are let go of within some seconds: a thread waits for the arrival of what was sent."""
    for _ in range(500):
        if all(reference.expired() for reference in references):
            return True
        time.sleep(0.01)
        gc.collect()
    return False


def track_memory(rank: int, mode: str) -> tuple[list[bool], bool, bool, bool]:
    layers = nn.Sequential(Track(), Track(), Track())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 4, rematerialize=mode, mesh=stages(3), timeout_seconds=10)
    own: Track = layers[rank]
    inputs, targets = images(8), torch.ones(8, 3, 4, 4)
    batch = [StorageWeakRef(tensor.untyped_storage()) for tensor in (inputs, targets)]
    pipeline.train_step((inputs, targets))
    del inputs, targets
    gone = eventually_expired(own.sent), eventually_expired(own.received), eventually_expired(batch)
    pipeline.close()
    return own.all_arrived, *gone


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_step_outlives_it(mode: str, processes: ProcessPool) -> None:
    for rank, (all_arrived, sent, received, batch) in enumerate(processes.run(3, track_memory, mode)):
        assert sent, f"rank {rank} keeps a boundary output"
        assert received, f"rank {rank} keeps a boundary input"
        assert batch, f"rank {rank} keeps the mini-batch"
        if mode == "always":
            assert all_arrived == [True], f"rank {rank} keeps outputs that have arrived while it recomputes"


# Wrong calls: one sentence, on all processes.


def errors_of(rank: int, what: str) -> tuple[str, str]:
    """Make a mistake and return the error's type and text."""
    try:
        MISTAKES[what](rank)
    except Exception as error:  # noqa: BLE001 - what is raised is the test
        return type(error).__name__, str(error)
    return "nothing", ""


def _other_targets(rank: int) -> None:
    pipeline = gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 4, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(8), torch.ones(6, 1)))


def _other_num_microbatches(rank: int) -> None:
    mesh = stages(3)
    pipeline = gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 4 - rank, mesh=mesh, timeout_seconds=10)
    pipeline.train_step((images(8), torch.ones(8, 1)))


def _late_to_hear(rank: int) -> None:
    receive = Messenger.receive

    def receive_late(self: Messenger, peer: int) -> Any:
        time.sleep(1 if rank == 2 else 0)
        return receive(self, peer)

    with mock.patch.object(Messenger, "receive", receive_late):
        _other_num_microbatches(rank)


def _other_partitions(rank: int) -> None:
    partitions = (2, 2, 2) if rank < 2 else (1, 3, 2)
    gpipe.Pipeline(mixed_layers(), mean_output, partitions, 4, mesh=stages(3), timeout_seconds=10)


class MakeSet(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"tensor": x, "numbers": {1, 2}}


def _unfit_payload(rank: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), MakeSet(), nn.Identity())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 2, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4), torch.ones(4, 1)))


class MakeSparse(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.to_sparse()


def _sparse_payload(rank: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), MakeSparse(), nn.Identity())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 2, mesh=stages(3), timeout_seconds=10)
    pipeline.train_step((images(4), torch.ones(4, 1)))


def _other_number_of_stages(rank: int) -> None:
    gpipe.Pipeline(mixed_layers(), mean_output, (3, 3), 4, mesh=stages(3), timeout_seconds=10)


def _other_number_of_devices(rank: int) -> None:
    settings = {"schedule": "interleaved_1f1b", "stages_per_device": 3, "mesh": stages(3)}
    gpipe.Pipeline(mixed_layers(), mean_output, (1, 1, 1, 1, 1, 1), 4, timeout_seconds=10, **settings)


def _other_names(rank: int) -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 4, mesh=mesh, timeout_seconds=10)


def _too_few_processes(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("stage",))
    gpipe.Pipeline(mixed_layers(), mean_output, (3, 3), 4, mesh=mesh, timeout_seconds=10)


MISTAKES = {function.__name__: function for function in (
    _other_targets, _other_num_microbatches, _late_to_hear, _other_partitions, _unfit_payload, _sparse_payload,
    _other_number_of_stages, _other_number_of_devices, _other_names, _too_few_processes,
)}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "cause", "culprit", "text"),
    [
        ("_other_targets", "ValueError", 2, "the mini-batch has 8 inputs and 6 targets"),
        ("_other_num_microbatches", "ValueError", None, "num_microbatches is 4 in stage 0 and 3 in stage 1"),
        ("_late_to_hear", "ValueError", None, "num_microbatches is 4 in stage 0 and 3 in stage 1"),
        ("_other_partitions", "ValueError", None, "partitions is [2, 2, 2] in stage 0 and [1, 3, 2] in stage 2"),
        ("_unfit_payload", "PipelineError", 1, "the payload['numbers'] is of type set ({1, 2})"),
        ("_sparse_payload", "PipelineError", 1, "the payload is a tensor of layout torch.sparse_coo"),
        ("_other_number_of_stages", "ValueError", None, "the mesh has 3 stages, but 2 partitions need 2 with stages"),
        ("_other_number_of_devices", "ValueError", None, "3 stages, but 6 partitions need 2 with stages_per_device=3;"),
        ("_other_names", "ValueError", None, "the mesh has the dimensions ('pp',)"),
        ("_too_few_processes", "ValueError", None, "the mesh holds 2 of the job's 3 processes"),
    ],
)
def test_a_mistake_is_one_sentence_on_all_processes(
    what: str, cause: str, culprit: int | None, text: str, processes: ProcessPool
) -> None:
    for rank, (kind, message) in enumerate(processes.run(3, errors_of, what)):
        assert kind == (cause if culprit in (None, rank) else "PeerFailure"), f"rank {rank}: {kind}: {message}"
        assert text in message and "\n" not in message, f"rank {rank}: {message}"
