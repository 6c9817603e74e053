"""Columns of Table 1 that are small enough to test the program."""

import torch
from torch import Tensor, nn

from experiments.table1_capacity.columns import Column
from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.batch_norm import convert_batch_norm


class Small(Column):
    """A column with few and small examples, and a small vocabulary."""

    @property
    def batch_size(self) -> int:
        """N."""
        return 4

    def layers(self, *, as_public_code: bool = False) -> nn.Sequential:
        """Describe the model on the meta device."""
        with torch.device("meta"):
            if self.num_filters is None:
                return transformer_lm(
                    self.num_layers, vocabulary_size=50, model_size=64, feedforward_size=256, num_heads=2
                )
            layers = amoebanet_d(self.num_layers, self.num_filters, 10, image_size=64, auxiliary_head=as_public_code)
        return convert_batch_norm(layers)

    def batch(self, size: int, device: str = "meta") -> tuple[Tensor, Tensor]:
        """Return a mini-batch of zeros."""
        if self.num_filters is None:
            tokens = torch.zeros(size, 64, dtype=torch.int64, device=device)
            return tokens, tokens
        images = torch.zeros(size, 3, 64, 64, device=device)
        return images, torch.zeros(size, dtype=torch.int64, device=device)


IMAGES, TEXT = Small("Pipeline-2", 3, 32, 2), Small("Pipeline-8", 6, None, 4)
COLUMNS = IMAGES, TEXT
