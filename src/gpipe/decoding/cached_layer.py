"""Decoder layers that process one position at a time and cache the keys and values of earlier positions.

The forward functions are the model's own: in a copy that shares the weights, only the attentions' inputs are replaced.
A row of states is a hypothesis. Every sentence of the memory has the same number of hypotheses, in consecutive rows.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.attention import MemoryAttention, SelfAttention
from gpipe.models.translation_layers import DecoderLayer, Decoding


@dataclass
class LayerCache:
    """One layer's cache for a batch.

    Attributes:
        past: keys and values of the positions so far, each [rows, heads, time, head size].
        memory: keys and values of the memory, joined, [sentences, memory time, 2 x channels].
    """

    past: tuple[Tensor, Tensor] | None = None
    memory: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a position; return those of all positions."""
        if self.past is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.past, (keys, values), strict=True))
        self.past = keys, values
        return self.past

    def reorder(self, rows: Tensor, sentences: Tensor) -> None:
        """Keep only these rows, in this order, and these sentences."""
        if self.past is not None:
            keys, values = self.past
            self.past = keys.index_select(0, rows), values.index_select(0, rows)
        if self.memory is not None and len(sentences) < len(self.memory):
            self.memory = self.memory.index_select(0, sentences)


class CachedLayer(nn.Module):
    """A decoder layer for the newest position: states [rows, 1, model_size] -> the same shape."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.past = _PastAttention(layer.attention)
        self.memory = _SharedMemoryAttention(layer.memory_attention)
        self.layer = _shallow_copy(layer)
        self.layer.add_module("attention", self.past)
        self.layer.add_module("memory_attention", self.memory)

    def forward(self, decoding: Decoding, cache: LayerCache) -> Decoding:
        """Run the layer, which reads and extends the cache."""
        self.past.cache = self.memory.keys_values.cache = cache
        output: Decoding = self.layer(decoding)
        return output


class _PastAttention(nn.Module):
    """Attention of the newest position to itself and all earlier ones."""

    cache: LayerCache

    def __init__(self, attention: SelfAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, states: Tensor, padding: None = None) -> Tensor:
        joint = self.attention.queries_keys_values(states).unflatten(-1, (3, self.attention.num_heads, -1))
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, *self.cache.extend(keys, values))
        output: Tensor = self.attention.output(mixed.transpose(1, 2).flatten(2))
        return output


class _SharedMemoryAttention(nn.Module):
    """Attention to a memory that all rows of a sentence share, as if the rows were positions of one sequence."""

    def __init__(self, attention: MemoryAttention) -> None:
        super().__init__()
        self.keys_values = _CachedProjection(attention.keys_values)
        self.attention = _shallow_copy(attention)
        self.attention.add_module("keys_values", self.keys_values)

    def forward(self, states: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        by_sentence = states.view(len(memory), -1, states.shape[-1])
        output: Tensor = self.attention(by_sentence, memory, padding)
        return output.view_as(states)


class _CachedProjection(nn.Module):
    """Compute the memory's keys and values once per batch."""

    cache: LayerCache

    def __init__(self, keys_values: nn.Module) -> None:
        super().__init__()
        self.keys_values = keys_values

    def forward(self, memory: Tensor) -> Tensor:
        if self.cache.memory is None:
            self.cache.memory = self.keys_values(memory)
        return self.cache.memory


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module but not its submodules, so that replacing one does not change the original."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
