"""What training computes on GPUs beside the pipeline's steps: metrics, averages of weights, resumed optimisers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpipe.training.ema import Ema
from gpipe.training.evaluation import EvaluationMetrics, MultiLabelMetrics, TokenMetrics
from tests.simulated_cuda import ledger
from tests.simulated_cuda.updates import update

METRIC_WAITS = "host synchronisations of metrics"


def compute(rank: int, device: str) -> dict[str, Any]:
    """Return sums of all metrics, averages and updated weights by name, and how often the host waited for the sums."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator).to(device)
    classes, languages = torch.randint(7, (2, 3), generator=generator), torch.tensor([0, 1])
    labels = torch.randint(2, (6, 7), generator=generator).float()
    ledger.forget()
    sums: dict[str, Tensor] = {
        "classes": EvaluationMetrics().measure(logits, classes),
        "labels": MultiLabelMetrics().measure(logits.view(6, 7), labels),
        "tokens": TokenMetrics(("de", "fr")).measure(logits, {"tokens": classes, "language": languages}),
    }
    found: dict[str, Any] = {METRIC_WAITS: ledger.counts["host synchronisations"]}
    layers = nn.ModuleDict({"0": nn.Linear(3, 2), "1": nn.BatchNorm1d(2)})
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.5)
    average = Ema(layers.to(device), decay=0.9)
    for num_steps in (1, 2):
        for parameter in layers.parameters():
            nn.init.constant_(parameter, 0.5 + num_steps)
        average.update(num_steps)
    found |= {name: tensor.cpu().numpy().copy() for name, tensor in (sums | average.state()).items()}
    for name in ("adamw", "rmsprop"):
        found |= {f"{name}, parameter {i}": values for i, values in enumerate(update(rank, name, device))}
    return found
