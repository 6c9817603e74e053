"""A small T(L, H, A) with dropout and tied tables on sentences of many lengths, trained for some steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from gpipe.data import TranslationLoader, open_corpus, open_tokenizer
from gpipe.models import translation_transformer
from gpipe.training.losses import TokenLoss, count_tokens

LANGUAGES = ["ast", "km", "wo"]
CUTS = {1: (10,), 2: (4, 6), 4: (2, 3, 2, 3)}
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """How the model is cut, M, the mode of re-materialisation and the tables that are one."""

    num_stages: int
    num_microbatches: int = 4
    rematerialize: str = "always"
    schedule: str = "gpipe"
    tied: str = "all"
    dropout: float = 0.3


@dataclass
class Outcome:
    """What a run left behind, by name; gradients are those of the last step."""

    reports: list[dict[str, float]]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    logits: np.ndarray | None


def batches(num_batches: int = NUM_STEPS) -> list[Any]:
    """Return mini-batches of the embedded corpus, whose lengths differ within and between them."""
    corpus = open_corpus(
        "multilingual_embedded",
        "train",
        tokenizer=open_tokenizer("multilingual_embedded", None),
        languages=LANGUAGES,
        max_tokens=40,
    )
    loader = TranslationLoader(corpus, 300, seed=4, shuffle=True, temperature=1.4)
    found = [batch for batch, _ in zip(loader, range(num_batches), strict=False)]
    assert len({batch[1]["tokens"].shape for batch in found}) == num_batches
    return found


def run(case: Case, mesh: Any = None) -> Outcome:
    """Train with Adam and clipping, and evaluate the last mini-batch."""
    with torch.device("meta"):
        layers = translation_transformer(
            3,
            24,
            2,
            vocabulary_size=4000,
            model_size=16,
            head_size=12,
            dropout=case.dropout,
            tied=case.tied,
            logit_limit=3.0,
        )
    pipeline = gpipe.Pipeline(
        layers,
        TokenLoss(0.1, logit_limit=3.0),
        CUTS[case.num_stages],
        case.num_microbatches,
        rematerialize=case.rematerialize,
        schedule=case.schedule,
        mesh=mesh,
        seed=3,
        loss_weight=count_tokens,
        timeout_seconds=10,
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    reports, norms = [], []
    found = batches()
    for inputs, targets in found:
        optimizer.zero_grad()
        report = pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
        reports.append({"loss": report.loss, **report.metrics})
        norms.append(pipeline.clip_gradients(0.5))
        optimizer.step()
    logits = pipeline.evaluate(found[-1][0] if pipeline.is_first else None)
    gradients = {name: parameter.grad.numpy() for name, parameter in pipeline.named_parameters()}
    weights = {name: parameter.detach().numpy() for name, parameter in pipeline.named_parameters()}
    pipeline.close()
    return Outcome(reports, norms, gradients, weights, None if logits is None else logits.numpy())


def run_in_processes(rank: int, cases: list[Case]) -> list[Outcome]:
    """Run cases with one process per stage; all have the same number of stages."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("stage",))
    return [run(case, mesh) for case in cases]
