"""A small model of each family of Table 1, to measure on a CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.batch_norm import convert_batch_norm
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.profile import LayerProfile, profile_layers

MICROBATCH_SIZE = 4


@dataclass(frozen=True)
class SmallModel:
    """A model with its loss; `batch` makes a mini-batch of a given size, `autocast` the context of steps."""

    title: str
    layers: nn.Sequential
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @cached_property
    def profiles(self) -> list[LayerProfile]:
        """The profiles of its layers with micro-batches of `MICROBATCH_SIZE`, its operations measured."""
        return self._profile(OperationMemory())

    @cached_property
    def described(self) -> list[LayerProfile]:
        """The same with nothing measured, as for a device that is not here."""
        return self._profile(None)

    def _profile(self, measured: OperationMemory | None) -> list[LayerProfile]:
        example = self.batch(MICROBATCH_SIZE)
        return profile_layers(self.layers, self.loss, example, autocast=self.autocast, measured=measured)


def make_images(size: int) -> tuple[Tensor, Tensor]:
    """Return images of 64 px, and labels of ten classes."""
    return torch.randn(size, 3, 64, 64), torch.arange(size) % 10


def make_tokens(vocabulary_size: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Return sequences of tokens, and their targets."""
    return torch.randint(vocabulary_size, (size, length)), torch.randint(vocabulary_size, (size, length))


def make_image_model() -> SmallModel:
    """Return an AmoebaNet-D for photographs."""
    layers = convert_batch_norm(amoebanet_d(3, 64, 10, image_size=64, auxiliary_head=False))
    return SmallModel("AmoebaNet-D (3,64), 64 px", layers, F.cross_entropy, make_images)


def make_text_model() -> SmallModel:
    """Return a Transformer for tokens, with dropout."""
    layers = transformer_lm(4, vocabulary_size=1000, model_size=128, feedforward_size=512, num_heads=4, dropout=0.1)
    return SmallModel("Transformer of 4 layers, 64 tokens", layers, token_loss, partial(make_tokens, 1000, 64))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens: [batch, time, vocabulary], [batch, time] -> a scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
