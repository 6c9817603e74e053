"""Simulate and plan the paper's Tables 2 and 3: how training speeds up with K and M.

    python -m experiments.table2_throughput

Times forward, recomputation, backward and update of every layer at the paper's scale on one core (--device cuda: on one
GPU), cuts the models by these seconds, and simulates the schedule of K such devices. The simulated links are slower
than the paper's by the factor by which this machine computes more slowly. The same grid is planned from the makers'
figures for the paper's devices. Eight minutes on one core; 12 GB. --plan-only needs two minutes. --small uses tiny
models instead.
"""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from experiments.program import StudyProgram, track
from experiments.table2_throughput.study import EFFICIENCY, TableModel
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.planning.accelerator import ACCELERATORS
from gpipe.planning.timing import LayerTimer
from gpipe.records import Record, make_record
from gpipe.training.optimizers import build_optimizer
from reproductions.table2_throughput import tables as table2
from reproductions.table3_slow_links import tables as table3

NUM_STAGES = (2, 4, 8)
NUM_CLASSES = 1000
# How to choose the micro-batches, and what the partitions balance.
WAYS = (("fits", "seconds"), ("fits", "flops"), ("fixed", "seconds"), ("equal", "seconds"))
NUMBERS_OF_MICROBATCHES = {"table2_throughput": (1, 4, 32), "table3_slow_links": (32,)}
SHOWN = {"table2_throughput": [table2.table2, *table2.SPEED_UPS.tables], "table3_slow_links": table3.TABLES}


def make_images(image_size: int, num_examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return noise and labels."""
    labels = torch.zeros(num_examples, dtype=torch.int64, device=device)
    return torch.randn(num_examples, 3, image_size, image_size, device=device), labels


def make_tokens(length: int, vocabulary_size: int, num_examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sequences drawn at random, and their targets."""
    inputs, targets = (torch.randint(vocabulary_size, (num_examples, length), device=device) for _ in range(2))
    return inputs, targets


def make_amoebanet(num_layers: int, num_filters: int, image_size: int) -> nn.Sequential:
    """Describe an AmoebaNet-D without auxiliary head, whose batch norm refuses a micro-batch of one image."""
    with torch.device("meta"):
        layers = amoebanet_d(num_layers, num_filters, NUM_CLASSES, image_size=image_size, dropout=0.5)
    return gpipe.convert_batch_norm(layers)


def make_transformer(num_layers: int, **sizes: int) -> nn.Sequential:
    """Describe a Transformer-L."""
    with torch.device("meta"):
        return transformer_lm(num_layers, **sizes)


def make_studies(*, is_small: bool) -> dict[str, list[TableModel]]:
    """Return the models of each table with the paper's devices: Table 1's TPUs, and GPUs linked by PCI-E."""
    v2, v3, p100 = (ACCELERATORS[name] for name in ("tpu_v2", "tpu_v3", "p100"))
    if is_small:
        narrow = make_transformer(8, vocabulary_size=64, model_size=32, feedforward_size=64, num_heads=2)
        table2 = [
            TableModel("AmoebaNet-D (3,16)", make_amoebanet(3, 16, 64), partial(make_images, 64), v2, 1, (1,)),
            TableModel("Transformer-8", narrow, partial(make_tokens, 16, 64), v3, 1, (1,)),
        ]
        table3 = [replace(study, device=p100) for study in table2]
    else:
        image, text = (partial(make_images, 224), 128, (1, 4, 16)), (partial(make_tokens, 1024, 32_000), 32, (1, 2))
        table2, table3 = [
            [
                TableModel(
                    f"AmoebaNet-D (18,{width})", make_amoebanet(18, width, 224), image[0], devices[0], *image[1:]
                ),
                TableModel(f"Transformer-{depth}", make_transformer(depth), text[0], devices[1], *text[1:]),
            ]
            for width, depth, devices in ((256, 48, (v2, v3)), (128, 24, (p100, p100)))
        ]
    return {"table2_throughput": table2, "table3_slow_links": table3}


def make_results(study: TableModel, numbers_of_microbatches: tuple[int, ...], kind: str) -> dict[str, Any]:
    """Return a model's part of a record."""
    grid = [(k, m) for k in NUM_STAGES for m in numbers_of_microbatches]
    measured = {} if kind == "planned" else study.timings
    timings = {size: [[*row.seconds[:3], row.update] for row in rows] for size, rows in measured.items()}
    return {
        "model": study.title,
        "device": study.device.name,
        "memory_bytes": study.device.memory_bytes,
        "batch_size": study.batch_size,
        "flops_per_second": study.flops_per_second(kind),
        "link_bytes_per_second": study.speed(kind).link_bytes_per_second,
        "layer_seconds": timings,  # forward, recomputation, backward, update of each layer and the loss
        "cells": [study.cell(*cell, kind, *way) for way in WAYS for cell in grid],
    }


def make_records(options: argparse.Namespace) -> dict[str, list[Record]]:
    """Measure, and return the records by the reproduction that they belong to."""
    device = torch.device(options.device)
    timer = LayerTimer(device, options.rounds, partial(build_optimizer, "rmsprop", lr=1e-6))
    studies = make_studies(is_small=options.small)
    if not options.plan_only:
        for study in track([study for models in studies.values() for study in models], "models timed"):
            study.measure(timer, device)
    kinds = ("planned",) if options.plan_only else ("planned", "simulated")
    return {
        name: [
            make_record(
                kind=kind,
                experiment=f"{name}_grid",
                seed=0,
                config={"repeats": options.rounds, "efficiency": EFFICIENCY, "device": device.type},
                results={"models": [make_results(study, NUMBERS_OF_MICROBATCHES[name], kind) for study in models]},
                gpus=[torch.cuda.get_device_name()] if device.type == "cuda" else [],
            )
            for kind in kinds
        ]
        for name, models in track(list(studies.items()), "tables planned and simulated")
    }


if __name__ == "__main__":
    program = StudyProgram(__doc__, SHOWN, rounds=3, what_rounds_are="repeats of each pass")
    parser = program.parser
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="the device that times the layers")
    parser.add_argument("--plan-only", action="store_true", help="neither measure nor simulate")
    parser.add_argument("--small", action="store_true", help="take tiny models")
    options = program.parse()
    if options.small:
        program.require_folder("--small only tries the program")
    torch.set_num_threads(1)  # a core stands for an accelerator
    program.publish(make_records(options))
