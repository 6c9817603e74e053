"""Layers change tensors in place: what autograd can follow is right, what a boundary breaks is refused by name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.microbatch import Payload
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")
SIZE = 6


class WithView(nn.Module):
    """Returns a tensor and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"whole": y, "view": y.view(-1, 2, 3)[:, 1]}


class Pass(nn.Module):
    """Hands on the very same tensors."""

    def forward(self, payload: dict[str, Tensor]) -> dict[str, Tensor]:
        return payload


class Change(nn.Module):
    """Changes one tensor of the payload in place."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, payload: dict[str, Tensor]) -> dict[str, Tensor]:
        payload[self.key].sigmoid_()
        return payload


class Use(nn.Module):
    """Uses both."""

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        return payload["whole"][:, :3] * payload["view"]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, SIZE, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def build(key: str) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(WithView(), Pass(), Change(key), Use())


@pytest.mark.parametrize("key", ["whole", "view"])
@pytest.mark.parametrize("mode", MODES)
def test_within_a_stage_a_change_reaches_the_view(mode: str, key: str) -> None:
    layers, plain = build(key), build(key)
    gpipe.Pipeline(layers, F.cross_entropy, [4], 1, rematerialize=mode).train_step(batch())
    F.cross_entropy(plain(batch()[0]), batch()[1]).backward()
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def message(stage: int, what: str) -> str:
    return (
        rf"(rank {stage}, )?stage {stage}, micro-batch 0, layer 2 \(Change\), {what}: ValueError: the layer changed in "
        r"place a tensor of the stage's input that shares memory with another one, .* use the layer's out-of-place "
        r"form \(inplace=False\), or return a copy of one of the two \(\.clone\(\)\) from the layer that makes them"
    )


def refused(key: str, partitions: list[int], mode: str, what: str, mesh: Any = None) -> str:
    """Return the error of a training step or of an evaluation, if this process learns of one."""
    layers = build(key)
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 2, rematerialize=mode, mesh=mesh, timeout_seconds=10)
    try:
        pipeline.train_step(batch()) if what == "forward" else pipeline.evaluate(batch()[0])
    except (gpipe.PipelineError, gpipe.PeerFailure) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("partitions", [[1, 3], [2, 2], [1, 1, 2]])
@pytest.mark.parametrize("key", ["whole", "view"])
@pytest.mark.parametrize("mode", MODES)
def test_a_change_that_would_not_reach_the_view_behind_a_boundary_is_refused(
    mode: str, key: str, partitions: list[int]
) -> None:
    for what in ("forward", "evaluation"):
        text = refused(key, partitions, mode, what)
        assert re.match(f"^{message(len(partitions) - 1, what)}$", text)


def refused_in_processes(rank: int, mode: str, what: str) -> str:
    return refused("whole", [1, 1, 2], mode, what, init_device_mesh("cpu", (3,), mesh_dim_names=("stage",)))


@pytest.mark.parametrize(("mode", "what"), [("always", "forward"), ("never", "forward"), ("always", "evaluation")])
def test_it_is_refused_in_a_process_of_its_own(mode: str, what: str, processes: ProcessPool) -> None:
    *_, text = processes.run(3, refused_in_processes, mode, what)
    assert re.match(f"^{message(2, what)}$", text)


class Fork(nn.Module):
    """Returns two tensors that have nothing to do with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"whole": self.linear(x), "other": self.linear(x + 1)}


class ChangeOne(nn.Module):
    """Changes one tensor in place after it has used the other one."""

    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        product = payload["other"] * payload["other"].tanh()
        return (payload["whole"].sigmoid_() * product)[:, :3]


def train_fork(rank: int, num_stages: int) -> list[Tensor]:
    mesh = None if num_stages == 1 else init_device_mesh("cpu", (num_stages,), mesh_dim_names=("stage",))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(Fork(), ChangeOne())
    partitions = [2] if num_stages == 1 else [1, 1]
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 2, rematerialize="never", mesh=mesh)
    pipeline.train_step(batch())
    pipeline.close()
    return [parameter.grad for parameter in pipeline.parameters()]


def test_a_change_of_one_received_tensor_is_none_of_another(processes: ProcessPool) -> None:
    found, _ = processes.run(2, train_fork, 2)
    for gradient, expected in zip(found, train_fork(0, 1), strict=True):
        assert torch.equal(gradient, expected)


class TakeTable(nn.Module):
    def forward(self, payload: dict[str, Tensor]) -> Tensor:
        return payload["table"]


class AddInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


def test_a_change_of_what_all_micro_batches_share_is_refused_where_it_travels_alone() -> None:
    pipeline = gpipe.Pipeline(
        nn.Sequential(TakeTable(), AddInPlace()), lambda x, _: x.mean(), [1, 1], 2, rematerialize="never"
    )
    inputs = {"x": torch.zeros(4, 2), "table": gpipe.replicated(torch.zeros(3))}
    with pytest.raises(ValueError, match=r"shares memory with another one, such as .* another micro-batch"):
        pipeline.train_step((inputs, torch.zeros(4)))


@pytest.mark.parametrize("partitions", [[3], [1, 2], [2, 1]])
def test_without_recomputation_a_first_layer_may_change_each_micro_batch_in_place(partitions: list[int]) -> None:
    found = []
    for inplace in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Sequential(nn.Flatten(), nn.SiLU(inplace)), nn.Linear(SIZE, 4), nn.Linear(4, 3))
        gpipe.Pipeline(layers, F.cross_entropy, partitions, 3, rematerialize="never").train_step(batch())
        found.append([parameter.grad for parameter in layers.parameters()])
    for gradient, expected in zip(*found, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("partitions", [[3], [1, 2]])
def test_a_number_that_is_not_finite_is_found_behind_a_layer_that_works_in_place(partitions: list[int]) -> None:
    layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.Linear(SIZE, 3))
    with torch.no_grad():
        layers[2].weight[0, 0] = torch.nan
    inputs, targets = torch.randn(4, SIZE), torch.arange(4) % 3
    pipeline = gpipe.Pipeline(layers, F.cross_entropy, partitions, 2, rematerialize="never")
    with pytest.raises(gpipe.NonFiniteError):
        pipeline.train_step((inputs, targets))
    found = pipeline.first_non_finite((inputs, targets))
    assert found is not None
    assert (found.layer, found.micro_batch) == (2, 0)


def test_tensors_that_share_memory_are_found() -> None:
    whole = torch.zeros(4, 6)

    def shared(*tensors: Tensor) -> list[bool]:
        payload = Payload.of(tensors)
        payload.find_shared(Payload.of(None))
        return payload.shared

    assert shared(whole, whole.view(-1)) == [True, True]
    assert shared(whole, torch.ones(2), whole[3], whole.clone()) == [True, False, True, False]
    assert shared(whole[:2], whole[2:]) == shared(whole, whole.clone()) == shared(whole, whole[:0]) == []


@pytest.mark.parametrize("views", [1, 2], ids=["passed", "viewed"])
def test_a_view_of_a_shared_tensor_is_shared_too(views: int) -> None:
    whole = torch.zeros(4, 6)
    before = Payload.of((whole, whole[1:]))
    before.find_shared(Payload.of(None))
    payload = Payload.of((before.tensors[1][1:] if views == 2 else before.tensors[1], torch.ones(2)))
    payload.find_shared(before)
    assert payload.shared == [True, False]


class AlsoInput(nn.Module):
    """Returns its input beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(2 * x), x


class ChangeSecond(nn.Module):
    """Changes the second tensor in place."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = pair
        return first * second.add_(1)[:, :3]


@pytest.mark.parametrize(
    ("schedule", "mode"), [("1f1b", "except_last"), ("gpipe", [0, 2])], ids=["1f1b", "one stage keeps"]
)
def test_what_a_later_stage_changed_is_no_beginning_of_a_recomputation(schedule: str, mode: Any) -> None:
    inputs, targets = batch()
    with pytest.raises(gpipe.PipelineError, match="a later stage changed in place a tensor that this stage passed on"):
        gpipe.Pipeline(
            nn.Sequential(AlsoInput(), ChangeSecond()),
            F.cross_entropy,
            [1, 1],
            2,
            schedule=schedule,
            rematerialize=mode,
        ).train_step((inputs.clone(), targets))


def test_what_a_later_stage_changed_is_right_where_nothing_is_recomputed() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(AlsoInput(), ChangeSecond())
    plain = copy.deepcopy(layers)
    inputs, targets = batch()
    gpipe.Pipeline(layers, F.cross_entropy, [1, 1], 1, rematerialize="never").train_step((inputs.clone(), targets))
    F.cross_entropy(plain(inputs.clone()), targets).backward()
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("prepare", [None, lambda pair: pair], ids=["as given", "prepared"])
def test_a_mask_of_all_micro_batches_may_not_be_changed(prepare: Any) -> None:
    mask = torch.ones(SIZE)
    pipeline = gpipe.Pipeline(
        nn.Sequential(ChangeMask(), nn.Linear(SIZE, 3)), F.cross_entropy, [2], 2, rematerialize="never",
        prepare_inputs=prepare,
    )  # fmt: skip
    with pytest.raises(gpipe.PipelineError, match="the same tensor of another micro-batch"):
        pipeline.train_step(((batch()[0], gpipe.replicated(mask)), batch()[1]))


class ChangeMask(nn.Module):
    """Changes the mask that it is given."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = pair
        return x * mask.add_(1)


class HandOnCount(nn.Module):
    """Returns a buffer that it moves in place, or a tensor of another attribute, beside its product."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.count: Tensor
        if is_buffer:
            self.register_buffer("count", torch.zeros(SIZE))
        else:
            self.count = torch.zeros(SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        return x * self.weight, self.count


class Multiply(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] * parts[1]


def train_counting(
    partitions: list[int], schedule: str, mesh: Any = None, mode: str = "never"
) -> tuple[float | None, list[float]]:
    """Return the loss of an evaluation, and the gradient of a step, where this process learns of them."""
    layers = nn.Sequential(HandOnCount(is_buffer=True), Multiply())
    pipeline = gpipe.Pipeline(
        layers, F.mse_loss, partitions, 3, rematerialize=mode, schedule=schedule, mesh=mesh, timeout_seconds=10
    )
    inputs = batch()[0]
    outputs = pipeline.evaluate(inputs)
    evaluated = None if outputs is None else float(outputs.double().sum())
    pipeline.train_step((inputs, torch.zeros(6, SIZE)))
    found = [float(value) for p in pipeline.parameters() if p.grad is not None for value in p.grad]
    pipeline.close()
    return evaluated, found


def train_counting_in_processes(rank: int) -> tuple[float | None, list[float]]:
    return train_counting([1, 1], "gpipe", init_device_mesh("cpu", (2,), mesh_dim_names=("stage",)))


def test_a_buffer_that_is_handed_on_and_moves_is_what_it_was_then(processes: ProcessPool) -> None:
    inputs = batch()[0].split(2)
    evaluated, gradient = train_counting([2], "gpipe", mode="always")  # one graph would see the buffer change
    assert evaluated == pytest.approx(sum(float(x.double().sum()) * (i + 1) for i, x in enumerate(inputs)), abs=1e-4)
    expected = sum(2 * (x.double() ** 2).sum(0) * (i + 4) ** 2 / 36 for i, x in enumerate(inputs))
    assert gradient == pytest.approx(expected.tolist(), rel=1e-5)
    for mode in MODES:
        assert train_counting([1, 1], "gpipe", mode=mode) == (evaluated, gradient)
    assert train_counting([1, 1], "1f1b")[1] == pytest.approx(gradient, rel=1e-6)
    (_, of_first), (of_last, _) = processes.run(2, train_counting_in_processes)
    assert (of_last, of_first) == (evaluated, gradient)


def test_another_tensor_that_is_handed_on_and_changed_is_refused() -> None:
    layers = nn.Sequential(HandOnCount(is_buffer=False), Multiply())
    pipeline = gpipe.Pipeline(layers, F.mse_loss, [1, 1], 3, rematerialize="never")
    with pytest.raises(
        ValueError, match=r"^a neighbour of stage 1 changed a tensor in place after passing it on; pass"
    ):
        pipeline.evaluate(batch()[0])


class Graph(nn.Module):
    """Has a sparse buffer, as networks of graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(6).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, x)


def test_a_buffer_may_be_sparse_in_an_evaluation() -> None:
    pipeline = gpipe.Pipeline(nn.Sequential(Graph(), nn.Identity()), F.mse_loss, [1, 1], 1)
    assert torch.equal(pipeline.evaluate(batch()[0]), batch()[0])


@pytest.mark.parametrize("overlap", [lambda x: x[:1, :2].expand(4, 2), lambda x: x.flatten()[:5].unfold(0, 2, 1)])
def test_a_change_of_examples_that_lie_in_each_others_memory_is_refused(overlap: Any) -> None:
    pipeline = gpipe.Pipeline(
        nn.Sequential(AddInPlace(), nn.Linear(2, 2)), lambda x, _: x.mean(), [1, 1], 4, rematerialize="never"
    )
    inputs = overlap(torch.ones(4, 4))
    for run in (lambda: pipeline.train_step((inputs, torch.zeros(4))), lambda: pipeline.evaluate(inputs)):
        with pytest.raises(ValueError, match=r"shares memory with another one, such as .* another micro-batch"):
            run()
