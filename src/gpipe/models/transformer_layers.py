"""The parts of every Transformer (Vaswani et al. 2017): embedding, positions and pre-norm layer."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.attention import SelfAttention
from gpipe.models.linear import Linear, fill_normal

_LONGEST_WAVE = 10_000  # positions, over 2 pi (Vaswani et al. 2017, section 3.5)


class Embedding(nn.Embedding):
    """Map tokens to states: a row of the table times the square root of its width, plus the position; then dropout.

    int64 [batch, time] -> [batch, time, model_size]. The rows have variance 1 / model_size. Positions count from
    `first_position`, without limit.
    """

    def __init__(self, vocabulary_size: int, model_size: int, dropout: float, first_position: int = 0) -> None:
        super().__init__(vocabulary_size, model_size)
        self.first_position = first_position
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Redraw the table."""
        fill_normal(self.weight, 1.0 / self.embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        states = super().forward(tokens) * math.sqrt(self.embedding_dim)
        output: Tensor = self.dropout(states + make_sinusoids(tokens.shape[1], states, self.first_position))
        return output


class PreNormLayer(nn.Module):
    """Two residual branches: self-attention, and two fully connected layers with a ReLU between them.

    Each branch begins with a layer norm and ends with dropout. Subclasses call the branches.

    Deviation: the paper does not say where a Transformer layer's norms stand; ours stand at the beginning of each
    branch, which trains deep models without a warm-up (Xiong et al. 2020).

    Args:
        model_size: the width of the states.
        feedforward_size: the width between the two fully connected layers.
        num_heads: attention heads.
        head_size: channels per head.
        dropout: the probability after each branch.
        scale: the factor of the two fully connected layers' initial weights.
        last_scale: the factor of the initial weights of each branch's last product.
    """

    causal = True  # a position attends only to itself and those before it

    def __init__(
        self,
        model_size: int,
        feedforward_size: int,
        num_heads: int,
        head_size: int,
        dropout: float,
        scale: float = 1.0,
        last_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_size)
        self.attention = SelfAttention(model_size, num_heads, head_size, causal=self.causal, scale=last_scale)
        self.feedforward_norm = nn.LayerNorm(model_size)
        self.widen = Linear(model_size, feedforward_size, scale)
        self.narrow = Linear(feedforward_size, model_size, scale * last_scale)
        self.dropout = nn.Dropout(dropout)

    def attend_to_itself(self, states: Tensor, padding: Tensor | None = None) -> Tensor:
        """Add the self-attention's output to the states."""
        output: Tensor = states + self.dropout(self.attention(self.attention_norm(states), padding))
        return output

    def feed_forward(self, states: Tensor) -> Tensor:
        """Add the fully connected layers' output to the states."""
        hidden = F.relu(self.widen(self.feedforward_norm(states)))
        output: Tensor = states + self.dropout(self.narrow(hidden))
        return output


class TransformerLayer(PreNormLayer):
    """A layer of a language model: every position attends to itself and those before it.

    [batch, time, model_size] -> the same shape. Before training, the branches of all `num_layers` layers together add
    about as much to the states as one branch would (Radford et al. 2019, section 2.3).
    """

    def __init__(
        self, model_size: int, feedforward_size: int, num_heads: int, dropout: float, *, num_layers: int
    ) -> None:
        head_size, last_scale = model_size // num_heads, 1 / math.sqrt(2 * num_layers)
        super().__init__(model_size, feedforward_size, num_heads, head_size, dropout, last_scale=last_scale)

    def forward(self, states: Tensor) -> Tensor:
        return self.feed_forward(self.attend_to_itself(states))


def make_sinusoids(num_positions: int, like: Tensor, first: int = 0) -> Tensor:
    """Return the positions' sines and cosines, [num_positions, width], for states `like` [..., width].

    The first half of a row has sines, the second has cosines, of wavelengths from 2 pi to 10,000 x 2 pi. The first row
    belongs to position `first`.
    """
    half = like.shape[-1] // 2
    # bfloat16 cannot represent 257: distinguishing positions takes float32 or more.
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponents = torch.arange(half, device=like.device, dtype=dtype) / max(half - 1, 1)
    frequencies = torch.exp(-math.log(_LONGEST_WAVE) * exponents)
    angles = torch.arange(first, first + num_positions, device=like.device, dtype=dtype)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(like.dtype)
