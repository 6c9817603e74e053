"""Updates of weights on GPUs."""

from __future__ import annotations

import torch
from torch import nn

from gpipe.training.optimizers import build_optimizer, load_optimizer_state, optimizer_state


def update(rank: int, name: str, device: str) -> list[list[float]]:
    """Update twice, the second time by an optimiser that was resumed; return the weights."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(3, 2).to(device)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)
    state: dict[str, torch.Tensor] = {}
    for _ in range(2):
        optimizer = build_optimizer(name, layer.named_parameters(), 0.1, weight_decay=0.1)
        assert all(
            bool(group.get("fused")) is (name != "rmsprop" and device == "cuda") for group in optimizer.param_groups
        )
        load_optimizer_state(optimizer, state)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        optimizer.step()
        if device == "cuda" and name != "rmsprop":  # a fused update counts its steps there
            assert all(value.is_cuda for slots in optimizer.state.values() for value in slots.values())
        state = {key: value.cpu() for key, value in optimizer_state(optimizer).items()}
    return [parameter.detach().cpu().flatten().tolist() for parameter in layer.parameters()]
