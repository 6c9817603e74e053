"""The layers of an encoder and a decoder, which form one sequence (Vaswani et al. 2017).

The payload between them is a tuple. Tokens and padding pass through the layers that do not need them:

    tokens      source, previous: int64 [batch, source time] and [batch, target time]
    encoding    states [batch, source time, model_size], padding, previous
    decoding    states [batch, target time, model_size], memory [batch, source time, model_size], padding

`padding` is bool [batch, source time], True where the source has padding.
"""

from typing import TypeAlias

import torch
from torch import Tensor, nn

from gpipe.models.attention import MemoryAttention
from gpipe.models.linear import Softmax, fill_normal
from gpipe.models.transformer_layers import Embedding, PreNormLayer

Tokens: TypeAlias = tuple[Tensor, Tensor]
Encoding: TypeAlias = tuple[Tensor, Tensor, Tensor]
Decoding: TypeAlias = tuple[Tensor, Tensor, Tensor]


class SourceEmbedding(nn.Module):
    """Tokens -> encoding: embed the source, find its padding, pass on the previous target tokens.

    Positions count from padding_index + 1, as in fairseq.
    """

    def __init__(self, vocabulary_size: int, model_size: int, dropout: float, padding_index: int) -> None:
        super().__init__()
        self.padding_index = padding_index
        self.embedding = Embedding(vocabulary_size, model_size, dropout, padding_index + 1)

    def forward(self, tokens: Tokens) -> Encoding:
        source, previous = tokens
        return self.embedding(source), source == self.padding_index, previous


class EncoderLayer(PreNormLayer):
    """Encoding -> encoding: every position attends to its whole sentence."""

    causal = False

    def forward(self, encoding: Encoding) -> Encoding:
        states, padding, previous = encoding
        return self.feed_forward(self.attend_to_itself(states, padding)), padding, previous


class TargetEmbedding(nn.Module):
    """Encoding -> decoding: normalise the states as the memory, and embed the previous target tokens."""

    def __init__(self, vocabulary_size: int, model_size: int, dropout: float, padding_index: int) -> None:
        super().__init__()
        self.memory_norm = nn.LayerNorm(model_size)
        self.embedding = Embedding(vocabulary_size, model_size, dropout, padding_index + 1)

    def forward(self, encoding: Encoding) -> Decoding:
        states, padding, previous = encoding
        return self.embedding(previous), self.memory_norm(states), padding


class DecoderLayer(PreNormLayer):
    """Decoding -> decoding: every position attends to itself and earlier ones, then to the memory.

    Padding comes after the target, so no position of the target attends to it.
    """

    def __init__(
        self, model_size: int, feedforward_size: int, num_heads: int, head_size: int, dropout: float, scale: float
    ) -> None:
        super().__init__(model_size, feedforward_size, num_heads, head_size, dropout, scale)
        self.memory_attention_norm = nn.LayerNorm(model_size)
        self.memory_attention = MemoryAttention(model_size, num_heads, head_size)

    def forward(self, decoding: Decoding) -> Decoding:
        states, memory, padding = decoding
        states = self.attend_to_itself(states)
        found = self.memory_attention(self.memory_attention_norm(states), memory, padding)
        return self.feed_forward(states + self.dropout(found)), memory, padding


class DecoderNorm(nn.Module):
    """Decoding -> its states [batch, target time, model_size], normalised."""

    def __init__(self, model_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model_size)

    def forward(self, decoding: Decoding) -> Tensor:
        states, _, _ = decoding
        output: Tensor = self.norm(states)
        return output


class TokenSoftmax(Softmax):
    """Fully connected layer without bias that makes one logit per token, limited in training mode.

    [batch, time, model_size] -> [batch, time, vocabulary_size].

    Args:
        model_size: the width of the states.
        vocabulary_size: the number of logits.
        logit_limit: clip logits to this magnitude in training mode; a clipped logit has no gradient. None for no limit.
        soft_limit: make each logit limit x tanh(logit / limit) instead.
    """

    def __init__(
        self, model_size: int, vocabulary_size: int, logit_limit: float | None = None, *, soft_limit: bool = False
    ) -> None:
        super().__init__(model_size, vocabulary_size, bias=False)
        self.logit_limit = logit_limit
        self.soft_limit = soft_limit

    def reset_parameters(self) -> None:
        """Redraw the weights like those of an embedding, to which they may be tied."""
        fill_normal(self.weight, 1.0 / self.in_features)

    def forward(self, states: Tensor) -> Tensor:
        logits = super().forward(states)
        limit = self.logit_limit
        if limit is None or not self.training:
            return logits
        return limit * torch.tanh(logits / limit) if self.soft_limit else logits.clamp(-limit, limit)
