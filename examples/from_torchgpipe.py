"""The same training with torchgpipe and with gpipe, step by step.

python examples/from_torchgpipe.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

LOSS = nn.functional.cross_entropy


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        yield torch.randn(64, 32, generator=generator), torch.randint(10, (64,), generator=generator)


def train_there() -> list[float]:
    from torchgpipe import GPipe

    model = GPipe(make_layers(), balance=[2, 3], devices=["cpu", "cpu"], chunks=4, checkpoint="except_last")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss = LOSS(model(inputs), targets)  # over the mini-batch, gathered on the last device
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_here() -> list[float]:
    import gpipe

    pipeline = gpipe.Pipeline(make_layers(), LOSS, [2, 3], num_microbatches=4, rematerialize="except_last")
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    losses = []
    for batch in make_batches():
        optimizer.zero_grad()
        report = pipeline.train_step(batch)  # forward, loss and backward of each micro-batch
        optimizer.step()
        losses.append(report.loss)
    return losses


if __name__ == "__main__":
    for there, here in zip(train_there(), train_here(), strict=True):
        print(f"torchgpipe {there:.6f}  gpipe {here:.6f}")
