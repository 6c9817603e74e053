"""The ten columns of the paper's Table 1: one model each, cut into K stages."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models import amoebanet_d, transformer_lm
from gpipe.pipeline.batch_norm import convert_batch_norm
from gpipe.pipeline.schedule import Rematerialize
from gpipe.planning.step import Setting

STATE_RATIO = 1.0  # RMSProp without momentum: 12 bytes per parameter with its weight and gradient, as the paper counts
# Of the paper, and of columns that are small enough to test the program.
IMAGE_SIZE, SMALL_IMAGE_SIZE = 224, 64
TOKENS, SMALL_TOKENS = 1024, 64
BATCH_SIZES, SMALL_BATCH_SIZE = {"amoebanet": 128, "transformer": 32}, 4
SMALL_TRANSFORMER = {"vocabulary_size": 50, "model_size": 64, "feedforward_size": 256, "num_heads": 2}
NUM_MICROBATCHES = 32  # Deviation: the paper does not say into how many micro-batches it cut these mini-batches.


@dataclass(frozen=True)
class Column:
    """A model of Table 1; `num_filters` is None for a Transformer. Naive is M = 1 without recomputation.

    is_small: with few and small examples, to test the program.
    """

    name: str
    num_layers: int
    num_filters: int | None
    num_stages: int
    is_small: bool = False

    @property
    def family(self) -> str:
        """The half of the table."""
        return "transformer" if self.num_filters is None else "amoebanet"

    @property
    def device(self) -> str:
        """The paper's accelerators, of 8 or 16 GB."""
        return "tpu_v3" if self.num_filters is None else "tpu_v2"

    @property
    def batch_size(self) -> int:
        """N, which the paper gives."""
        return SMALL_BATCH_SIZE if self.is_small else BATCH_SIZES[self.family]

    @property
    def setting(self) -> Setting:
        """The setting in which the column runs."""
        if self.name.startswith("Naive"):
            return Setting(1, 1, Rematerialize.NEVER, state_ratio=STATE_RATIO)
        return Setting(self.num_stages, NUM_MICROBATCHES, state_ratio=STATE_RATIO)

    def layers(self, *, as_public_code: bool = False) -> nn.Sequential:
        """Describe the model on the meta device; `as_public_code`: with an auxiliary head and 1001 classes."""
        with torch.device("meta"):
            if self.num_filters is None:
                return transformer_lm(self.num_layers, **(SMALL_TRANSFORMER if self.is_small else {}))
            num_classes = 10 if self.is_small else 1001 if as_public_code else 1000
            size, num_filters = self.image_size, self.num_filters
            layers = amoebanet_d(
                self.num_layers, num_filters, num_classes, image_size=size, auxiliary_head=as_public_code
            )
        return convert_batch_norm(layers)

    @property
    def image_size(self) -> int:
        """Pixels per side."""
        return SMALL_IMAGE_SIZE if self.is_small else IMAGE_SIZE

    def batch(self, size: int, device: str = "meta") -> tuple[Tensor, Tensor]:
        """Return a mini-batch of zeros; on the meta device it is only described."""
        if self.num_filters is None:
            length = SMALL_TOKENS if self.is_small else TOKENS
            tokens = torch.zeros(size, length, dtype=torch.int64, device=device)
            return tokens, tokens
        images = torch.zeros(size, 3, self.image_size, self.image_size, device=device)
        return images, torch.zeros(size, dtype=torch.int64, device=device)


def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits [..., classes] and classes [...]."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


COLUMNS = (
    Column("Naive-1", 18, 208, 1),
    Column("Pipeline-1", 18, 416, 1),
    Column("Pipeline-2", 18, 544, 2),
    Column("Pipeline-4", 36, 544, 4),
    Column("Pipeline-8", 72, 512, 8),
    Column("Naive-1", 3, None, 1),
    Column("Pipeline-1", 13, None, 1),
    Column("Pipeline-8", 103, None, 8),
    Column("Pipeline-32", 415, None, 32),
    Column("Pipeline-128", 1663, None, 128),
)
SMALL_COLUMNS = Column("Pipeline-2", 3, 32, 2, is_small=True), Column("Pipeline-8", 6, None, 4, is_small=True)


def describe(column: Column) -> dict[str, Any]:
    """Return the column's model as it is in records."""
    return {
        "family": column.family,
        "name": column.name,
        "num_layers": column.num_layers,
        "num_filters": column.num_filters,
        "num_stages": column.num_stages,
    }
