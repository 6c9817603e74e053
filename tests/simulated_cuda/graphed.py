"""Layers that are run as CUDA graphs, and such that cannot be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.simulated_cuda import ledger


class _Counting(nn.Module):
    """Adds how often it ran, from a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


class _Changing(nn.Module):
    """Scales by an attribute."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Renewed(nn.Linear):
    """Gets other parameters, in the same memory."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def renew(self) -> None:
        self.load_state_dict(self.state_dict(), assign=True)


class _InPlace(nn.Module):
    """Changes its input, which is the output of another layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class _PassingBy(nn.Module):
    """Returns its input beside its output; the first of several takes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, both: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        before, x = both if isinstance(both, tuple) else (both, both)
        return x, self.linear(x) * before + x.sigmoid()


class _Views(nn.Linear):
    """Returns a tensor and a view of it."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.view_as(y)


class _ChangesBoth(nn.Module):
    """Changes the second tensor by changing the first one."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0].mul_(2) + both[1]


class _Hiding(nn.Linear):
    """Reads its weight from a list."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weights: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.weights:
            self.weights.append(self.weight)
        return x @ self.weights[0] + self.bias


class _Second(nn.Module):
    """Takes the second of two tensors."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[1]


class _Waiting(nn.Module):
    """Waits for the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


LAYERS = {
    "counting": lambda: [_Counting()],
    "changing": lambda: [_Changing()],
    "renewed": lambda: [_Renewed()],
    "in place": lambda: [_InPlace()],
    "passing by": lambda: [_PassingBy(), _PassingBy(), _PassingBy(), _Second()],
    "waiting": lambda: [_Waiting()],
    "views": lambda: [_Views(), _ChangesBoth()],
    "hiding": lambda: [_Hiding()],
    "empty": lambda: [nn.Unflatten(1, (2, 2)), nn.Flatten()],
}


def train_layers(rank: int, name: str, mode: str, *, cuda_graphs: bool, num_steps: int = 3) -> dict[str, Any]:
    """Train some steps; return the losses, the gradients, the buffers and how many graphs each step launched."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), *LAYERS[name](), nn.Linear(4, 5))
    pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, [len(layers)], 2, rematerialize=mode, devices="cuda")
    if cuda_graphs:
        pipeline.use_cuda_graphs()
    generator, found = torch.Generator().manual_seed(1), dict[str, Any]()
    for step in range(num_steps):
        for layer in pipeline.layers.values():
            if isinstance(layer, _Changing):
                layer.scale = float(max(step, 1))
            if isinstance(layer, _Renewed) and step == 2:
                layer.renew()
        ledger.forget()
        batch = torch.randn(4, 4, generator=generator), torch.randint(5, (4,), generator=generator)
        found[f"loss {step}"] = pipeline.train_step(batch).loss
        found[f"graphs {step}"] = ledger.counts["graphs on cuda:0"]
    found |= {name: one.grad.cpu().numpy().copy() for name, one in pipeline.named_parameters() if one.grad is not None}
    found |= {name: one.cpu().numpy().copy() for name, one in pipeline.layers.named_buffers()}
    pipeline.close()
    return found


def train_all(rank: int, names: list[str], *, cuda_graphs: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """Train layers of each name in two modes, one after the other."""
    return {
        (name, mode): train_layers(rank, name, mode, cuda_graphs=cuda_graphs)
        for name in names
        for mode in ("always", "never")
    }


def exchange_among_replicas(rank: int) -> list[str]:
    """Return what is said to layers of two replicas that exchange in the midst of a step."""
    mesh, said = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage")), []
    for name in ("synchronize_batch_norm", "shard_replicas"):
        layers = gpipe.convert_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        assert isinstance(layers, nn.Sequential)
        options: dict[str, Any] = {name: True}
        pipeline = gpipe.Pipeline(
            layers, nn.functional.cross_entropy, [2], mesh=mesh, devices=f"cuda:{torch.cuda.current_device()}",
            timeout_seconds=10, **options,
        )  # fmt: skip
        try:
            pipeline.use_cuda_graphs()
        except ValueError as error:
            said.append(str(error))
        pipeline.close()
    return said


def replay(rank: int) -> list[float]:
    """Capture an addition, look at the memory, and replay it twice."""
    own, found = torch.ones((), device="cuda:0"), []
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(0)
    with torch.cuda.stream(side):
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        own += 1
        twice = own * 2
        graph.capture_end()
    found += [own.item()]
    for _ in range(2):
        graph.replay()
        found += [own.item(), twice.item()]
    return found


def break_rules(rank: int) -> list[str]:
    """Return what is said to a capture on the default stream, one that holds up all threads, and a wait in one."""
    graph, side, said = torch.cuda.CUDAGraph(), torch.cuda.Stream(0), []
    own = torch.ones((), device="cuda:0")
    try:
        graph.capture_begin(capture_error_mode="thread_local")
    except RuntimeError as error:
        said.append(str(error))
    with torch.cuda.stream(side):
        try:
            graph.capture_begin()
        except RuntimeError as error:
            said.append(str(error))
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            own.item()
        except RuntimeError as error:
            said.append(str(error))
        graph.capture_end()
    return said
