"""GPipe's step as a plain loop over Gloo for one shape: the time that Gloo and autograd need by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (outputs - targets).square().mean()


def run_hand_written_step(
    layer: nn.Module, rank: int, num_stages: int, batch: tuple[Tensor, Tensor], size: int
) -> None:
    """Run a step of one layer per process over micro-batches of one example of `size` numbers."""
    is_first, is_last = rank == 0, rank == num_stages - 1
    inputs, targets = (list(part.split(1)) for part in batch)
    num, sends = len(inputs), []
    gradients = [torch.empty(1, size) for _ in inputs]
    arriving = [] if is_first else [dist.irecv(inputs[m], rank - 1, tag=m) for m in range(num)]
    returning = [] if is_last else [dist.irecv(gradients[m], rank + 1, tag=num + m) for m in range(num)]
    outputs = []
    for m in range(num):
        if not is_first:
            arriving[m].wait()
            inputs[m].requires_grad_()
        outputs.append(layer(inputs[m]))
        if is_last:
            outputs[m] = compute_loss(outputs[m], targets[m]) / num
        else:
            sends.append(dist.isend(outputs[m].detach(), rank + 1, tag=m))
    for m in reversed(range(num)):
        if is_last:
            outputs[m].backward()
        else:
            returning[m].wait()
            outputs[m].backward(gradients[m])
        if not is_first:
            sends.append(dist.isend(inputs[m].grad, rank - 1, tag=num + m))
    for send in sends:
        send.wait()
