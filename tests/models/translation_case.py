"""A small T(L, H, A), and a batch of sentences of unlike lengths for it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpipe.models import translation_transformer

PADDING, END = 1, 2
VOCABULARY = 30
# Eight channels in each of three heads are wider than the states; every sentence has another length.
SMALL = {"vocabulary_size": VOCABULARY, "model_size": 16, "head_size": 8}
SOURCES = [[5, 6, 7, 8, 9, END], [10, END], [11, 12, 13, END]]
TARGETS = [[14, 15, END], [16, 17, 18, 19, 20, 21, END], [22, END]]


def make_model(num_layers: int = 2, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return translation_transformer(num_layers, 24, 3, **(SMALL | options))  # type: ignore[arg-type]


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Make one batch of sentences, with padding behind the shorter ones."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PADDING)


def shift(target: Sequence[int]) -> list[int]:
    """Return the target one position later, behind the end of the sentence before it."""
    return [END, *target[:-1]]


def batch() -> tuple[Tensor, Tensor]:
    return pad(SOURCES), pad([shift(target) for target in TARGETS])
