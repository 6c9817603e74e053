"""The models that the engines train, small and large variants of the paper's two, with made-up mini-batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models import amoebanet_d, transformer_lm

NUM_CLASSES, VOCABULARY_SIZE = 10, 1000


@dataclass(frozen=True)
class Workload:
    """A model and the size of its mini-batches.

    Attributes:
        title: of the model, in tables.
        make: makes the layers, on the meta device; a stage gives its layers weights later.
        batch_size: examples of a mini-batch.
        shape: of one example.
        size: of the model, for the record.
    """

    title: str
    make: Callable[[], nn.Sequential]
    batch_size: int
    shape: tuple[int, ...]
    size: dict[str, int] = field(default_factory=dict)

    def layers(self) -> nn.Sequential:
        """Describe the model without taking memory."""
        with torch.device("meta"):
            return self.make()

    def batch(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the same inputs and targets in every process."""
        generator = torch.Generator().manual_seed(0)
        if len(self.shape) == 1:  # tokens: the next one is the target
            tokens = torch.randint(VOCABULARY_SIZE, (self.batch_size, self.shape[0] + 1), generator=generator)
            return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
        images = torch.randn(self.batch_size, *self.shape, generator=generator)
        return images.to(device), torch.randint(NUM_CLASSES, (self.batch_size,), generator=generator).to(device)

    def describe(self) -> dict[str, Any]:
        """Return the description in a record."""
        return {"model": self.title, "batch_size": self.batch_size, "shape": list(self.shape), **self.size}


def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over examples, or over all their tokens."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _make_amoebanet(num_layers: int, num_filters: int, pixels: int, batch_size: int) -> Workload:
    make = partial(amoebanet_d, num_layers, num_filters, NUM_CLASSES, image_size=pixels)
    return Workload(f"AmoebaNet-D ({num_layers},{num_filters}), {pixels} px", make, batch_size, (3, pixels, pixels))


def _make_transformer(num_layers: int, model_size: int, num_heads: int, num_tokens: int, batch_size: int) -> Workload:
    size = {"vocabulary_size": VOCABULARY_SIZE, "model_size": model_size, "feedforward_size": 4 * model_size}
    make = partial(transformer_lm, num_layers, num_heads=num_heads, **size)
    title = f"Transformer-{num_layers}, {model_size} wide, {num_tokens} tokens"
    return Workload(title, make, batch_size, (num_tokens,), size | {"num_heads": num_heads})


MODELS = ("amoebanet", "transformer")
# Without dropout, because every engine draws its masks differently. "paper" is for GPUs: close to Tables 2 and 3.
SCALES = {
    "tiny": dict(zip(MODELS, (_make_amoebanet(3, 8, 32, 8), _make_transformer(6, 16, 2, 8, 8)), strict=True)),
    "laptop": dict(zip(MODELS, (_make_amoebanet(6, 32, 64, 64), _make_transformer(8, 256, 4, 128, 32)), strict=True)),
    "paper": dict(
        zip(MODELS, (_make_amoebanet(18, 256, 224, 128), _make_transformer(24, 2048, 32, 512, 32)), strict=True)
    ),
}
