"""Measure the tokens per second and the model FLOPs utilisation of Transformer-L's layers.

    python -m experiments.transformer_utilization

Trains a few of the paper's layers (2048 wide, feed-forward 8192, 32 heads) on noise through the engine, with 32
sequences of 1,024 tokens per step in bfloat16, with and without re-materialisation, compiled and not. The settings take
turns, and the median over the rounds counts. A CPU has no maker's peak to compare with, so there the table has only
tokens per second, and --record needs a folder.

The utilisation is that of the model: it counts the FLOPs of a forward pass, and twice as many for its backward pass,
but no recomputation. All products of attention count, although half of them are masked (PaLM, appendix B).
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gpipe
from experiments.program import StudyProgram
from experiments.turns import clock, take_turns
from gpipe.models.transformer_layers import TransformerLayer
from gpipe.planning.accelerator import recognize_accelerator
from reproductions.table2_throughput.step_costs import TRANSFORMER_UTILIZATION

CLAIM = "table2_throughput"
MODEL_SIZE, WIDENING, HEAD_SIZE = 2048, 4, 64
STEPS_PER_ROUND = 4


def make_layers(num_layers: int, width: int) -> nn.Sequential:
    """Describe layers, of the paper's size if they are `MODEL_SIZE` wide, without the tables around them."""
    with torch.device("meta"):
        return nn.Sequential(
            *(
                TransformerLayer(width, WIDENING * width, width // HEAD_SIZE, 0.0, num_layers=num_layers)
                for _ in range(num_layers)
            )
        )


def count_forward_flops(num_layers: int, batch: int, time_steps: int, width: int) -> int:
    """Return the FLOPs of a forward pass: two per multiplication and addition."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        make_layers(num_layers, width)(torch.empty(batch, time_steps, width, device="meta"))
    return counter.get_total_flops()


def compute_mean_square(outputs: Tensor, _: Tensor) -> Tensor:
    """Return a loss that costs next to nothing and needs no targets."""
    return outputs.float().square().mean()


def make_clock(
    rematerialize: str, *, compiled: bool, arguments: argparse.Namespace, device: str
) -> Callable[[], float]:
    """Return what makes some steps of the layers, and returns the seconds per step."""
    inputs = torch.randn(arguments.batch, arguments.sequence, arguments.width, device=device)
    pipeline = gpipe.Pipeline(
        make_layers(arguments.layers, arguments.width),
        compute_mean_square,
        [arguments.layers],
        arguments.micro_batches,
        rematerialize=rematerialize,
        devices=device,
    )
    if compiled:
        pipeline.compile()

    def step() -> None:
        for parameter in pipeline.parameters():
            parameter.grad = None
        with torch.autocast(device, torch.bfloat16):
            pipeline.train_step((inputs, torch.zeros(arguments.batch)))

    return partial(clock, step, STEPS_PER_ROUND, pipeline.job.wait_for_devices)


if __name__ == "__main__":
    tables = {CLAIM: TRANSFORMER_UTILIZATION.tables}
    program = StudyProgram(
        __doc__, tables, rounds=5, what_rounds_are=f"turns of each setting, of {STEPS_PER_ROUND} steps"
    )
    sizes = {"layers": 4, "width": MODEL_SIZE, "batch": 32, "sequence": 1024, "micro-batches": 1}
    for name, default in sizes.items():
        program.parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    program.parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = program.parse()
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        program.require_folder("torch finds no GPU, and the page has only GPUs")
    known = recognize_accelerator(torch.cuda.get_device_name(0)) if has_gpu else None
    peak = known and known.flops_per_second("bfloat16")
    ways = {
        (mode, compiled): make_clock(mode, compiled=compiled, arguments=arguments, device="cuda" if has_gpu else "cpu")
        for mode, compiled in product(("never", "always"), (False,) if arguments.no_compile else (False, True))
    }
    tokens = arguments.batch * arguments.sequence
    flops = count_forward_flops(arguments.layers, arguments.batch, arguments.sequence, arguments.width)
    rows = []
    for (mode, compiled), found in take_turns(ways, arguments.rounds).items():
        seconds = median(found)
        row = {"rematerialize": mode, "compiled": compiled, "step_seconds": seconds}
        row |= {"tokens_per_second": tokens / seconds, "utilization": peak and 3 * flops / seconds / peak}
        rows.append(row)
    names = ("layers", "width", "batch", "sequence", "micro_batches", "rounds")
    gpus = [torch.cuda.get_device_name(0)] if has_gpu else []
    config = {name: getattr(arguments, name) for name in names}
    results = {"rows": rows, "peak_flops_per_second": peak}
    program.publish_record(TRANSFORMER_UTILIZATION.make_record(config, results, gpus=gpus))
