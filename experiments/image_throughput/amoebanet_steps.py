"""Training steps of two AmoebaNets, up to the gradients: our pipeline of one stage, and a loop over torchgpipe's."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.models import amoebanet_b, amoebanet_d

NUM_CLASSES, NUM_MICROBATCHES = 1000, 4
VARIANTS = {"b": amoebanet_b, "d": amoebanet_d}
Step = Callable[[torch.Tensor, torch.Tensor], object]


def choose_memory_format(device: torch.device) -> torch.memory_format:
    """Return the format of images and weights: channels last on a GPU."""
    # Not on a CPU: torch 2.13's backward of a strided 1x1 convolution of few channels then writes out of bounds.
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def make_our_step(
    variant: str,
    num_layers: int,
    num_filters: int,
    mode: str,
    device: torch.device,
    backend: str | None,
    *,
    cuda_graphs: bool = False,
) -> tuple[Step, nn.Module]:
    """Return a step of our model, and its layers; `backend` is torch.compile's, or None to not compile.

    1F1B has the order of torchgpipe's loop: each micro-batch goes back before the next one goes forward.
    """
    with torch.device("meta"):
        layers = VARIANTS[variant](num_layers, num_filters, NUM_CLASSES)
    gpipe.convert_batch_norm(layers)
    pipeline = gpipe.Pipeline(
        layers, F.cross_entropy, [len(layers)], NUM_MICROBATCHES,
        rematerialize=mode, schedule="1f1b", devices=[device],
    )  # fmt: skip
    pipeline.layers.to(memory_format=choose_memory_format(device))
    if backend is not None:
        pipeline.compile(dynamic=False, backend=backend)
    if cuda_graphs:
        pipeline.use_cuda_graphs()
    return lambda images, labels: pipeline.train_step((images, labels)), pipeline.layers


def make_torchgpipe_step(num_layers: int, num_filters: int, mode: str, device: torch.device) -> tuple[Step, nn.Module]:
    """Return a step of torchgpipe's AmoebaNet-D, and the model; the mode "always" recomputes whole micro-batches.

    The models of torchgpipe's benchmarks must be importable.
    """
    from amoebanet import amoebanetd

    model = amoebanetd(NUM_CLASSES, num_layers, num_filters).to(device, memory_format=choose_memory_format(device))
    forward = partial(checkpoint, model, use_reentrant=False) if mode == "always" else model

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        for part, targets in zip(images.chunk(NUM_MICROBATCHES), labels.chunk(NUM_MICROBATCHES), strict=True):
            loss = F.cross_entropy(forward(part), targets) * (len(part) / len(images))
            with torch.autocast(device.type, enabled=False):
                loss.backward()

    return step, model
