"""Count and measure the cost of a loss over a large vocabulary: in one pass, and by torch's separate operations.

    python -m experiments.loss_cost

A micro-batch of translation in training, with the loss with smoothed labels, the likelihood, the accuracy and the
clipped logits, and one of an evaluation. The bytes are counted on tensors without data, for 4,096 tokens and a
vocabulary of 64,000. The seconds are measured on one core, with a tenth of the tokens: both ways take turns, and the
ratio is the median over the pairs. Two minutes.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.program import StudyProgram, track
from experiments.turns import median_ratio, take_turns
from gpipe.planning.ledger import Work
from gpipe.planning.profile import profile_layers
from gpipe.training.evaluation import TokenMetrics
from gpipe.training.losses import TokenLoss
from reproductions.table2_throughput.step_costs import LOSS_BYTES, LOSS_SECONDS

NUM_TOKENS, LENGTH, VOCABULARY = 4096, 256, 64_000
SMOOTHING, LIMIT, PADDING = 0.1, 30.0, 1
Loss = Callable[[Any, dict[str, Tensor]], Any]


def train_one_by_one(logits: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute what TokenLoss does, each figure by an operation on all logits in float32."""
    tokens, rows = targets["tokens"].flatten(), logits.float().flatten(0, -2)
    loss = F.cross_entropy(rows, tokens, ignore_index=PADDING, label_smoothing=SMOOTHING)
    rows, counts = rows.detach(), tokens != PADDING
    correct = (rows.topk(1).indices == tokens[:, None]).any(1)
    metrics = {
        "nll": F.cross_entropy(rows, tokens, ignore_index=PADDING),
        "top1": (correct & counts).sum() / counts.sum(),
        "clipped": ((rows.abs() >= LIMIT).float().mean(1) * counts).sum() / counts.sum(),
    }
    return loss, metrics


@torch.no_grad()
def evaluate_one_by_one(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Compute what TokenMetrics does for one language, likewise."""
    tokens, rows = targets["tokens"].flatten(), logits.float().flatten(0, -2)
    losses = F.cross_entropy(rows, tokens, reduction="none")
    figures = tokens != PADDING, losses, (rows.topk(1).indices == tokens[:, None]).any(1)
    return torch.stack([(values * figures[0]).double().sum() for values in figures])


WAYS: dict[str, tuple[Loss, Loss]] = {
    "training": (TokenLoss(SMOOTHING, padding_index=PADDING, logit_limit=LIMIT), train_one_by_one),
    "evaluation": (TokenMetrics(["one"], PADDING).measure, evaluate_one_by_one),
}
"""In one pass, and by one operation after the other."""


class _Scale(nn.Module):
    """Makes logits of logits, so that they have a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((), dtype=dtype, device="meta"))

    def forward(self, logits: Tensor) -> Tensor:
        return self.weight * logits


def make_targets(num_tokens: int, device: str) -> dict[str, Tensor]:
    """Return targets without padding."""
    tokens = torch.full((num_tokens // LENGTH, LENGTH), 7, dtype=torch.int64, device=device)
    return {"tokens": tokens, "language": torch.zeros(len(tokens), dtype=torch.int64, device=device)}


def count(loss: Loss, dtype: torch.dtype) -> dict[str, Any]:
    """Return what the passes of one way move and allocate, and how many operations they start."""
    logits = torch.empty(NUM_TOKENS // LENGTH, LENGTH, VOCABULARY, dtype=dtype, device="meta")
    profile = profile_layers(nn.Sequential(_Scale(dtype)), loss, (logits, make_targets(NUM_TOKENS, "meta")))[-1]
    return {
        "logits_bytes": logits.nbytes,
        "forward": _describe(profile.forward, profile.peaks.forward),
        "backward": _describe(profile.backward, profile.peaks.backward + profile.kept_bytes),
    }


def _describe(work: tuple[Work, ...], peak_bytes: int) -> dict[str, int]:
    moved = sum(one.bytes_moved for one in work)
    return {"bytes_moved": moved, "peak_bytes": peak_bytes if work else 0, "operations": len(work)}


def measure(ways: tuple[Loss, Loss], dtype: torch.dtype, rounds: int, *, trains: bool) -> dict[str, Any]:
    """Return the median seconds of the separate operations, and the ratio of one pass to them."""
    num_tokens = NUM_TOKENS // LENGTH // 10 * LENGTH
    logits = torch.randn(num_tokens // LENGTH, LENGTH, VOCABULARY).to(dtype).requires_grad_(trains)
    targets = make_targets(num_tokens, "cpu")
    clocks = {str(place): partial(_clock, loss, logits, targets, trains=trains) for place, loss in enumerate(ways)}
    own, others = take_turns(clocks, rounds, what=None).values()
    return {"one_by_one_seconds": median(others), "one_pass_of_it": median_ratio(own, others)}


def _clock(loss: Loss, logits: Tensor, targets: dict[str, Tensor], *, trains: bool) -> float:
    start = time.process_time()
    found = loss(logits, targets)
    if trains:
        torch.autograd.grad(found[0], logits)
    return time.process_time() - start


if __name__ == "__main__":
    tables = {"table2_throughput": [*LOSS_BYTES.tables, *LOSS_SECONDS.tables]}
    program = StudyProgram(__doc__, tables, rounds=10, what_rounds_are="pairs of both ways")
    options = program.parse()
    torch.set_num_threads(1)
    cases = [(name, dtype) for name in WAYS for dtype in (torch.float32, torch.bfloat16)]
    counted, measured = [], []
    for name, dtype in track(cases, "cases"):
        case = {"what": name, "dtype": str(dtype).removeprefix("torch.")}
        for way, loss in zip(("one pass", "one by one"), WAYS[name], strict=True):
            counted.append(case | {"way": way} | count(loss, dtype))
        measured.append(case | measure(WAYS[name], dtype, options.rounds, trains=name == "training"))
    config = {"num_tokens": NUM_TOKENS, "vocabulary_size": VOCABULARY, "label_smoothing": SMOOTHING}
    records = [
        LOSS_BYTES.make_record(config, {"rows": counted}, kind="planned"),
        LOSS_SECONDS.make_record(config | {"rounds": options.rounds}, {"rows": measured}),
    ]
    program.publish({"table2_throughput": records})
