"""Gradients are averaged bucket by bucket, behind the backward, and awaited at the end of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.pipeline.schedule import Task
from gpipe.pipeline.shared import averaging
from gpipe.pipeline.shared.averaging import BUCKET_BYTES, Averaging
from gpipe.pipeline.shared.replicas import Replicas
from tests.support.process_pool import ProcessPool


class TwoReplicas(Replicas):
    """This replica, and another one that sends what `other` makes of a bucket."""

    count = 2


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The buckets in the order in which they were reduced; the other replica is as this one."""
    found: list[Tensor] = []

    class Work:
        def __init__(self, flat: Tensor) -> None:
            self.flat = flat  # which torch's own may hold too

        def wait(self) -> None:
            """Do nothing: it is done."""

    def all_reduce(flat: Tensor, group: Any, *, async_op: bool) -> Work:
        assert async_op
        flat.mul_(2)
        found.append(flat)
        return Work(flat)

    monkeypatch.setattr(averaging.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(Averaging, "_copy_from_first_replica", lambda _: None)
    return found


def run_backward(layers: nn.Sequential, inputs: Tensor, *, is_awaited: bool = False) -> Averaging:
    found = Averaging(dict(enumerate(layers)), TwoReplicas(), is_awaited=is_awaited)
    found.start_step()
    with found.reducing():
        layers(inputs).sum().backward()
    found.reduce_all()
    return found


class Noting(nn.Module):
    """Notes how many buckets have been reduced when its backward runs."""

    def __init__(self, reduced: list[Tensor]) -> None:
        super().__init__()
        self.reduced, self.counts = reduced, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.register_hook(lambda _: self.counts.append(len(self.reduced)))
        return x


@pytest.mark.parametrize("is_awaited", [False, True])
def test_buckets_are_reduced_while_a_backward_goes_on_unless_a_stage_waits_for_it(
    is_awaited: bool, reduced: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "BUCKET_BYTES", 4 * 4 * 4)
    noting = Noting(reduced)
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), noting, nn.Linear(4, 4, bias=False))
    expected = [torch.autograd.grad(layers(torch.ones(2, 4)).sum(), parameter)[0] for parameter in layers.parameters()]
    noting.counts.clear()
    run_backward(layers, torch.ones(2, 4), is_awaited=is_awaited)
    assert noting.counts == [0 if is_awaited else 1] and len(reduced) == 2
    for parameter, gradient in zip(layers.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_gradients_become_aligned_views_of_their_bucket_with_the_strides_of_their_parameters(
    reduced: list[Tensor],
) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 7, 3))
    layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run_backward(layers, torch.randn(2, 3, 9, 9))
    (flat,) = reduced
    for parameter in layers.parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert (parameter.grad.data_ptr() - flat.data_ptr()) % 512 == 0
        assert parameter.grad.stride() == parameter.stride()
    assert sum(parameter.nbytes for parameter in layers.parameters()) < flat.nbytes < BUCKET_BYTES


def test_after_a_step_nothing_holds_a_bucket_but_its_gradients(reduced: list[Tensor]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = Averaging(dict(enumerate(layers)), TwoReplicas())
    found.start_step()
    layers[0](torch.ones(1, 4)).sum().backward()
    found.reduce_all()
    found.wait()
    found.finish_step()
    bucket = StorageWeakRef(reduced.pop().untyped_storage())
    layers.zero_grad()
    assert bucket.expired()


def test_types_have_buckets_of_their_own(reduced: list[Tensor]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    found = Averaging(dict(enumerate(layers)), TwoReplicas())
    found.start_step()
    with found.reducing():
        layers[1](layers[0](torch.ones(1, 4)).double()).sum().backward()
    found.reduce_all()
    assert [flat.dtype for flat in reduced] == [torch.float64, torch.float32]


def test_what_no_replica_has_gets_no_gradient(reduced: list[Tensor]) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].bias.requires_grad_()
    unused = nn.Parameter(torch.ones(3))
    layers[0].register_parameter("unused", unused)
    found = run_backward(layers, torch.ones(1, 4))
    assert unused.grad is not None, "another replica may have one"
    found.wait()
    found.finish_step()
    assert unused.grad is None and layers[0].weight.grad is not None


def test_of_a_split_backward_only_the_gradients_that_wait_are_awaited(
    reduced: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "BUCKET_BYTES", 4)
    noting = Noting(reduced)
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), noting, nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    first, second = layers[0].weight, layers[2].weight
    for parameter in layers[3].parameters():
        parameter.grad = torch.ones(4)
        parameter.requires_grad_()
    found = Averaging(dict(enumerate(layers)), TwoReplicas(), is_awaited=True)  # but not for gradients of weights
    found.start_step()
    with found.reducing([first, second]):
        assert len(reduced) == 2, "those of the norm are there"
        (layers[0](torch.ones(1, 4)).sum() + layers[2](torch.ones(1, 4)).sum()).backward()
    assert len(reduced) == 4


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.linear, x, use_reentrant=True)
        return x


def test_a_gradient_that_comes_in_two_parts_is_an_error(reduced: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        run_backward(nn.Sequential(TwoParts()), torch.ones(1, 4, requires_grad=True))


class Waiting(torch.autograd.Function):
    """The identity; its backward waits until the store has a key."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, store: dist.Store | None) -> Tensor:
        ctx.store = store
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.store is not None:
            ctx.store.wait(["replica 0 has the gradient"])
        return gradient, None


class Waits(nn.Linear):
    """A layer whose backward waits, where it has a store."""

    store: dist.Store | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Waiting.apply(x, self.store))


def hand_over(rank: int, schedule: str) -> list[Tensor]:
    """Train a step; the last stage of replica 1 waits until the first stage of replica 0 has its gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    store = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Waits(4, 4))
    pipeline = gpipe.Pipeline(
        layers, nn.functional.mse_loss, [1, 1], 2, schedule=schedule, mesh=mesh, timeout_seconds=20
    )
    if rank == 3:
        layers[1].store = store
    if rank == 0:
        stage = pipeline.stages[0]
        backward = stage.backward

        def note(micro_batch: int, gradients: Any, **options: Any) -> Any:
            if micro_batch == 0:
                store.set("replica 0 has the gradient", "")
            return backward(micro_batch, gradients, **options)

        stage.backward = note  # type: ignore[method-assign]
    inputs = torch.arange(16.0).view(4, 4) / 16 + rank // 2
    (stage,), send, begun = pipeline.stages.values(), pipeline.job.transfer.send, list[bool]()

    def watch(task: Task, result: Any) -> None:
        if task.kind.makes_gradients:
            begun.extend(bucket._work is not None for bucket in stage.averaging._buckets)  # type: ignore[union-attr]
        send(task, result)

    pipeline.job.transfer.send = watch  # type: ignore[method-assign]
    pipeline.train_step((inputs, inputs.flip(0)))
    pipeline.close()
    assert begun == ([False, False] if rank % 2 else [])
    return [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("schedule", ["gpipe", "split_gpipe"])
def test_a_gradient_is_handed_over_before_its_stage_has_the_averages(schedule: str, processes: ProcessPool) -> None:
    found = processes.run(4, hand_over, schedule)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs = torch.cat([torch.arange(16.0).view(4, 4) / 16 + replica for replica in (0, 1)])
    targets = torch.cat([part.flip(0) for part in inputs.split(4)])
    nn.functional.mse_loss(layers(inputs), targets).backward()
    for rank, gradients in enumerate(found):
        for gradient, parameter in zip(gradients, layers[rank % 2].parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
