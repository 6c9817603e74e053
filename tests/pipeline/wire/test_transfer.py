"""Whatever crosses the boundary between two processes arrives as it was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gpipe
from tests.pipeline.wire.mixed_layers import images, mean_output, mixed_layers, stages
from tests.support.hosts import host_of_its_own
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")


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
            "negative without dimensions": complex_.sum().conj().imag,
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


class Rename(nn.Module):
    """Returns equal tensors in another nest each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return ({"a": x}, {"b": x}, [x], (x,))[self.calls % 4]


class NoteNest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, payload: Any) -> Tensor:
        self.seen.append(str([*payload]) if isinstance(payload, dict) else type(payload).__name__)
        return next(iter(payload.values() if isinstance(payload, dict) else payload))


def note_nests(rank: int) -> list[str]:
    layers = nn.Sequential(Rename(), NoteNest())
    pipeline = gpipe.Pipeline(layers, mean_output, [1, 1], 1, mesh=stages(2), timeout_seconds=10)
    for _ in range(5):
        pipeline.evaluate(images(2))
    pipeline.close()
    return layers[1].seen


def test_the_nest_may_change_where_the_tensors_do_not(processes: ProcessPool) -> None:
    assert processes.run(2, note_nests)[1] == ["['b']", "list", "tuple", "['a']", "['b']"]


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2


class ChangeOne(nn.Module):
    """Changes one of two tensors in place, after the other one was saved for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = pair
        product = first * self.weight
        return product + second.mul_(2)


def change_one(rank: int) -> list[float]:
    with host_of_its_own():
        pipeline = gpipe.Pipeline(
            nn.Sequential(Pair(), ChangeOne()), mean_output, [1, 1], 1, rematerialize="never", mesh=stages(2),
            timeout_seconds=10,
        )  # fmt: skip
        pipeline.train_step((torch.zeros(3), torch.ones(3)))
        pipeline.close()
    return [float(parameter.grad) for parameter in pipeline.parameters()]


def test_a_change_in_place_of_one_tensor_is_none_of_another_that_arrived_with_it(processes: ProcessPool) -> None:
    assert processes.run(2, change_one) == [[], [1.0]]


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


def train_under_another_default(rank: int) -> list[float]:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 1, 1))
    for layer in layers:
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    batch = images(5), torch.ones(5, 1, 1, 1)
    with torch.device("meta"):  # in which layers are described
        pipeline = gpipe.Pipeline(
            layers, mean_output, [1, 1], 2, mesh=stages(2), devices=torch.device("cpu"), timeout_seconds=10
        )
        losses = [pipeline.train_step(batch).loss for _ in range(2)]
        pipeline.close()
    return losses


@pytest.mark.parametrize("is_apart", [False, True], ids=["one host", "hosts"])
def test_the_default_device_is_the_users_own(is_apart: bool, processes: ProcessPool) -> None:
    function = train_apart_under_another_default if is_apart else train_under_another_default
    expected = 2 * [(images(5).sum(1, keepdim=True) * 0.1 * 3 * 0.1).mean().item()]
    for losses in processes.run(2, function):
        assert losses == pytest.approx(expected, rel=1e-5)


def train_apart_under_another_default(rank: int) -> list[float]:
    with host_of_its_own():
        return train_under_another_default(rank)


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
