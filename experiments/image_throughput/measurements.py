"""Measure how many images per second a model trains on, and whether a batch fits."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from experiments.image_throughput.amoebanet_steps import (
    NUM_CLASSES,
    NUM_MICROBATCHES,
    Step,
    choose_memory_format,
    make_our_step,
    make_torchgpipe_step,
)


class Setting(NamedTuple):
    """A model, its images, and the first batch size to try."""

    variant: str
    num_layers: int
    num_filters: int
    image_size: int
    batch_size: int


FULL = (Setting("b", 18, 512, 480, 128), Setting("d", 18, 256, 224, 512))
SMALL = (Setting("b", 3, 8, 64, 4), Setting("d", 3, 16, 224, 4))  # torchgpipe's classifier fits 224 px alone


def measure(step: Step, modules: nn.Module, images: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Return the images/s of the median step, the GPU's peak memory, and the number of parameters."""
    is_cuda = images.device.type == "cuda"
    labels = torch.randint(NUM_CLASSES, (len(images),), device=images.device)
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.0)  # the labels are random, and the loss must stay finite
    seconds = []
    for _ in range(options.warm_up + options.rounds):
        start = time.perf_counter()
        with torch.autocast(images.device.type, torch.bfloat16):
            step(images, labels)
        optimizer.step()
        optimizer.zero_grad()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "images_per_second": len(images) / statistics.median(seconds[options.warm_up :]),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "num_parameters": sum(parameter.numel() for parameter in modules.parameters()),
    }


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a lack of GPU memory."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or ran_out_of_memory(error.__cause__))


def try_batch(
    make: Callable[[], tuple[Step, nn.Module]], images: torch.Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a model with a batch, and say whether it fits."""
    gc.collect()
    torch.compiler.reset()
    if images.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return {"outcome": "measured"} | measure(*make(), images, options)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return {"outcome": "out of memory"}


def measure_rows(
    setting: Setting, mode: str, options: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model and a mode; halve the batch size until all but CUDA graphs fit, which need more."""
    model, fixed = setting[:3], setting._asdict() | {"rematerialize": mode}
    ours, theirs = partial(make_our_step, *model, mode, device), partial(make_torchgpipe_step, *model[1:], mode, device)
    makers = {("ours", False, False): partial(ours, None)}
    if options.backend is not None:
        makers["ours", True, False] = partial(ours, options.backend)
    if options.cuda_graphs:
        makers["ours", False, True] = partial(ours, None, cuda_graphs=True)
    if setting.variant == "d" and options.torchgpipe is None:
        yield fixed | {"code": "torchgpipe", "compiled": False, "cuda_graphs": False, "outcome": "not run"}
    elif setting.variant == "d":
        makers = {("torchgpipe", False, False): theirs} | makers
    batch_size, fits = setting.batch_size, False
    while not fits and batch_size >= NUM_MICROBATCHES:
        images = torch.randn(batch_size, 3, setting.image_size, setting.image_size, device=device)
        images = images.contiguous(memory_format=choose_memory_format(device))
        for (code, compiled, graphs), make in makers.items():
            row = fixed | {"batch_size": batch_size, "code": code, "compiled": compiled, "cuda_graphs": graphs}
            row |= try_batch(make, images, options)
            yield row
            if not (fits := graphs or row["outcome"] == "measured"):
                break
        batch_size //= 2
