"""Measure the cost of splitting a backward: both of its parts beside a whole one.

    python -m experiments.split_cost

Layers of Transformer-L and cells of AmoebaNet-D with 128 filters, each with the graph of one micro-batch, as its stage
would build it. A whole backward and a split one take turns on one core; gradients are added to existing ones. Results
are medians of paired ratios. Three minutes on an idle core.
"""

import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gpipe
from experiments.program import StudyProgram, track
from experiments.turns import median_ratio, take_turns
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.layers.split_backward import run_split_backward
from gpipe.pipeline.microbatch import Payload
from reproductions.bubble.schedules import SPLIT_COST

NUM_FILTERS, NUM_TOKENS = 128, 64


class Case(NamedTuple):
    """A layer and its input."""

    name: str
    layer: nn.Module
    inputs: Any


def list_cases() -> list[Case]:
    """Return layers of both families, in training mode."""
    cases = []
    for width in (256, 512, 1024):
        torch.manual_seed(0)
        model = transformer_lm(1, vocabulary_size=16, model_size=width, feedforward_size=4 * width, num_heads=8)
        states = torch.randn(4, NUM_TOKENS, width)
        cases.append(Case(f"Transformer-L, {width} wide, 4 x {NUM_TOKENS} tokens", model[1], states))
    for pixels in (64, 128, 224):
        torch.manual_seed(0)
        net = gpipe.convert_batch_norm(amoebanet_d(3, NUM_FILTERS, 10)).train()
        value: Any = torch.randn(2, 3, pixels, pixels)
        for index, layer in enumerate(net):
            if index in (3, 5):  # a normal cell of the first group, a normal cell of the second
                cases.append(Case(f"AmoebaNet-D, cell {index}, 2 x {pixels} px", layer, value))
            with torch.no_grad():
                value = layer(value)
    return cases


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return the median seconds of a whole backward, and the median ratios of a split one to it."""
    found = take_turns({"whole": partial(_run, case), "split": partial(_run, case, splits=True)}, rounds, what=None)
    (whole, _), (split, first) = (list(zip(*seconds, strict=True)) for seconds in found.values())
    return {
        "name": case.name,
        "whole_seconds": statistics.median(whole),
        "parts_of_whole": median_ratio(split, whole),
        "first_part": median_ratio(first, split),
    }


def _run(case: Case, *, splits: bool = False) -> tuple[float, float]:
    """Make one backward; return the seconds of all of it, and of its first part."""
    inputs = Payload.of(case.inputs)
    # Behind an operation of its own, as behind a boundary: a leaf would copy its gradient.
    inputs.tensors = [tensor.detach().requires_grad_().view_as(tensor) for tensor in inputs.tensors]
    outputs = [t for t in Payload.of(case.layer(inputs.value())).tensors if t.requires_grad]
    edges = [get_gradient_edge(tensor) for tensor in outputs]
    seeds = [torch.full_like(tensor, 0.1) for tensor in outputs]
    del outputs
    start = time.process_time()
    if not splits:
        torch.autograd.backward(edges, seeds)
        return time.process_time() - start, 0.0
    waiting = run_split_backward(list(zip(edges, seeds, strict=True)))
    middle = time.process_time()
    waiting.compute()
    return time.process_time() - start, middle - start


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"bubble": SPLIT_COST.tables}, rounds=40, what_rounds_are="turns of each layer")
    options = program.parse()
    torch.set_num_threads(1)
    rows = [measure(case, options.rounds) for case in track(list_cases(), "layers")]
    settings = {"num_filters": NUM_FILTERS, "num_tokens": NUM_TOKENS, "rounds": options.rounds}
    program.publish_record(SPLIT_COST.make_record(settings, {"layers": rows}))
