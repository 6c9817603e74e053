"""A boundary tensor arrives as far off a 64-byte line as it was made, with its strides: sums keep their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gpipe
from tests.support.process_pool import ProcessPool

CASES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunks": lambda x: x.chunk(2, -1),
    "windows": lambda x: (x[:, 3:].unfold(1, 5, 5), x[0, 1:].expand(len(x), 29)),
    "without holes": lambda x: (x.view(-1)[7:].view(-1), x.double().view(-1)[1:], x.view(-1)[:0]),
    "windows that overlap": lambda x: (
        x.unfold(1, 7, 1),
        x[:, 3:].unfold(1, 5, 2),
        x[0, 1:].unfold(0, 5, 1).expand(2, 25, 5),
    ),
    "one": lambda x: (x[1:],),
}


class Make(nn.Module):
    """Makes parts of one tensor."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 30)
        self.case = case

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return CASES[self.case](self.linear(x))


class Look(nn.Module):
    """Notes where what arrives lies, and sums it up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 3)
        self.seen: list[list[tuple[int, ...]]] = []

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        self.seen.append([(part.data_ptr() % 64, *part.stride()) for part in parts])
        sums = torch.stack([(part * part.exp()).sum().float() for part in parts])
        return self.linear(sums.sum().expand(30))[None]


def train(rank: int, case: str, mode: str, num_stages: int) -> tuple[list[list[tuple[int, ...]]], list[Tensor]]:
    mesh = None if num_stages == 1 else init_device_mesh("cpu", (num_stages,), mesh_dim_names=("stage",))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(Make(case), Look())
    partitions = [2] if num_stages == 1 else [1, 1]
    pipeline = gpipe.Pipeline(
        layers, lambda o, t: F.cross_entropy(o, t[:1]), partitions, 2, rematerialize=mode, mesh=mesh
    )
    inputs = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        pipeline.train_step((inputs, torch.arange(7) % 3))
    pipeline.close()
    return layers[1].seen, [parameter.grad for parameter in pipeline.parameters()]


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_arrives_where_it_began_with_its_strides(case: str, mode: str, processes: ProcessPool) -> None:
    seen, expected = train(0, case, mode, 1)
    (_, first), (found, second) = processes.run(2, train, case, mode, 2)
    assert found == seen
    for gradient, other in zip(first + second, expected, strict=True):
        assert torch.equal(gradient, other)
