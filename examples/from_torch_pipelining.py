"""The same training with torch.distributed.pipelining and with gpipe, step by step, over two processes.

torchrun --nproc-per-node 2 examples/from_torch_pipelining.py
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

LOSS = nn.functional.cross_entropy


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        yield torch.randn(64, 32, generator=generator), torch.randint(10, (64,), generator=generator)


def train_there() -> list[float]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == 1
    part = make_layers()[:2] if is_first else make_layers()[2:]  # each process cuts out its own stage
    schedule = ScheduleGPipe(PipelineStage(part, dist.get_rank(), 2, torch.device("cpu")), 4, loss_fn=LOSS)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    losses = []
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        found: list[Tensor] = []  # of each micro-batch, on the last stage
        schedule.step(*([inputs] if is_first else []), target=targets if is_last else None, losses=found)
        optimizer.step()
        losses.append(sum(loss.item() for loss in found) / 4)
    return losses


def train_here() -> list[float]:
    import gpipe

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    pipeline = gpipe.Pipeline(make_layers(), LOSS, [2, 3], num_microbatches=4, rematerialize="never", mesh=mesh)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)  # of this process's stage
    losses = []
    for batch in make_batches():
        optimizer.zero_grad()
        losses.append(pipeline.train_step(batch).loss)  # the same call and the same loss on every process
        optimizer.step()
    pipeline.close()
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = zip(train_there(), train_here(), strict=True)
    if dist.get_rank() == 1:
        for there, here in found:
            print(f"torch {there:.6f}  gpipe {here:.6f}")
    dist.destroy_process_group()
