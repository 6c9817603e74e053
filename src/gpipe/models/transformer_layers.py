"""The layers of a Transformer (Vaswani et al. 2017): embedding and pre-norm block."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.attention import CausalSelfAttention
from gpipe.models.initialization import fill_normal
from gpipe.models.linear import Linear

_LONGEST_WAVE = 10_000  # positions, over 2 pi (Vaswani et al. 2017, section 3.5)


class Embedding(nn.Embedding):
    """Tokens to states: a row of the table each, times the root of the width, plus its position; then dropout.

    int64 [batch, time] -> [batch, time, model_size]. The rows have variance 1 / model_size. Any number of positions.
    """

    def __init__(self, vocabulary_size: int, model_size: int, dropout: float) -> None:
        super().__init__(vocabulary_size, model_size)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        fill_normal(self.weight, 1.0 / self.embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        states = super().forward(tokens) * math.sqrt(self.embedding_dim)
        output: Tensor = self.dropout(states + sinusoids(tokens.shape[1], states))
        return output


class TransformerLayer(nn.Module):
    """Self-attention, then two fully connected layers with a ReLU between; each is added to what it was given.

    [batch, time, model_size] -> the same. A layer norm stands before each of the two, dropout behind it.

    Deviation: the paper does not say where its layer norms stand; before is what trains deep models without a warm-up
    (Xiong et al. 2020).
    """

    def __init__(self, model_size: int, feedforward_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_size)
        self.attention = CausalSelfAttention(model_size, num_heads)
        self.feedforward_norm = nn.LayerNorm(model_size)
        self.widen = Linear(model_size, feedforward_size)
        self.narrow = Linear(feedforward_size, model_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.dropout(self.attention(self.attention_norm(states)))
        hidden = F.relu(self.widen(self.feedforward_norm(states)))
        output: Tensor = states + self.dropout(self.narrow(hidden))
        return output


def sinusoids(num_positions: int, like: Tensor) -> Tensor:
    """Return sines and cosines of each position, [num_positions, width], for states [..., width] like those given.

    The first half of a row are sines, the second cosines, of wavelengths from 2 pi to 10,000 x 2 pi.
    """
    half = like.shape[-1] // 2
    # bfloat16 has no 257: positions are told apart in float32 at least.
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponents = torch.arange(half, device=like.device, dtype=dtype) / max(half - 1, 1)
    frequencies = torch.exp(-math.log(_LONGEST_WAVE) * exponents)
    angles = torch.arange(num_positions, device=like.device, dtype=dtype)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)
