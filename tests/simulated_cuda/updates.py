"""Updates of weights on GPUs."""

from __future__ import annotations

import torch
from torch import nn

from gpipe.planning.optimizer_memory import NUM_PARAMETERS
from gpipe.training.optimizers import build_optimizer, load_optimizer_state, optimizer_state

FUSED = ("adamw", "sgd")


def update(rank: int, name: str, device: str) -> list[list[float]]:
    """Update twice, the second time by an optimiser that was resumed; return the weights."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(3, 2).to(device)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.5)
    state: dict[str, torch.Tensor] = {}
    for _ in range(2):
        optimizer = build_optimizer(name, layer.named_parameters(), 0.1, weight_decay=0.1)
        way = "fused" if name in FUSED else "foreach"
        assert all(bool(group[way]) is (device == "cuda") for group in optimizer.param_groups)
        load_optimizer_state(optimizer, state)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        optimizer.step()
        if device == "cuda" and name in FUSED:  # such an update counts its steps there
            assert all(value.is_cuda for slots in optimizer.state.values() for value in slots.values())
        state = {key: value.cpu() for key, value in optimizer_state(optimizer).items()}
    return [parameter.detach().cpu().flatten().tolist() for parameter in layer.parameters()]


def measure_update(rank: int, name: str) -> float:
    """Return what an update allocates for a while on a GPU, per byte of parameters, once its state is there."""
    parameters = [nn.Parameter(torch.ones(64, 16, device="cuda")) for _ in range(NUM_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    named = [(f"layers.0.{number}", parameter) for number, parameter in enumerate(parameters)]
    optimizer = build_optimizer(name, named, 0.1, weight_decay=0.1)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    return (torch.cuda.max_memory_allocated() - before) / sum(parameter.nbytes for parameter in parameters)
