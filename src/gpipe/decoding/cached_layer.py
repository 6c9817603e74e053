"""A decoder layer at the newest position, with a cache of what earlier positions and the memory give.

A row of states is a hypothesis. Every sentence of the memory has the same number of hypotheses, in consecutive rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gpipe.models.attention import join_heads, split_heads
from gpipe.models.translation_layers import DecoderLayer, Decoding


class CachedLayer:
    """A decoder layer for one batch, position by position: states [rows, 1, model_size] -> the same shape.

    Keys and values are [rows, heads, time, head size] of the positions so far, and [sentences, heads, memory time, head
    size] of the memory.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer
        self._past: Sequence[Tensor] = ()
        self._memory: tuple[Tensor, Tensor] | None = None

    def __call__(self, decoding: Decoding) -> Decoding:
        """Run the layer in evaluation mode, and extend the cache."""
        states, memory, padding = decoding
        layer, attention = self._layer, self._layer.attention
        joint = attention.queries_keys_values(layer.attention_norm(states))
        queries, *new = split_heads(joint, 3, attention.num_heads)
        self._past = [torch.cat(pair, dim=2) for pair in zip(self._past, new, strict=True)] if self._past else new
        states = states + attention.output(join_heads(F.scaled_dot_product_attention(queries, *self._past)))
        self._memory = self._memory or layer.memory_attention.project(memory)
        # All rows of a sentence share its memory, as if they were positions of one sequence.
        by_sentence = layer.memory_attention_norm(states).view(len(memory), -1, states.shape[-1])
        found = layer.memory_attention.attend(by_sentence, *self._memory, padding)
        return layer.feed_forward(states + found.view_as(states)), memory, padding

    def reorder(self, new_order: Tensor) -> None:
        """Move the cache to the hypotheses' new rows, and drop finished sentences."""
        assert self._memory is not None, "there is no order before the first position"
        keys, values = self._memory
        remaining = find_remaining(new_order, len(self._past[0]) // len(keys))
        self._past = [each.index_select(0, new_order) for each in self._past]
        if len(remaining) < len(keys):
            self._memory = keys.index_select(0, remaining), values.index_select(0, remaining)


def find_remaining(new_order: Tensor, num_rows: int) -> Tensor:
    """Return the unfinished sentences, given the old row of every new row; the rows of a sentence stay together."""
    return new_order[::num_rows] // num_rows
