"""Multi-head attention of a sequence to itself and to a memory (Vaswani et al. 2017).

num_heads x head_size need not equal the states' width. torch's fused scaled_dot_product_attention does the work.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.linear import Linear


class SelfAttention(nn.Module):
    """Attention of every position to all positions except padding or, if causal, to itself and all before it.

    [batch, time, model_size] -> the same shape. One product makes queries, keys and values. Causal attention needs no
    padding mask, because padding comes after the sequence. `scale` is the factor of the output's initial weights.
    """

    def __init__(self, model_size: int, num_heads: int, head_size: int, *, causal: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.queries_keys_values = Linear(model_size, 3 * num_heads * head_size)
        self.output = Linear(num_heads * head_size, model_size, scale)

    def forward(self, states: Tensor, padding: Tensor | None = None) -> Tensor:
        queries, keys, values = split_heads(self.queries_keys_values(states), 3, self.num_heads)
        mask = None if padding is None else _make_mask(padding)
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=self.causal)
        output: Tensor = self.output(join_heads(mixed))
        return output


class MemoryAttention(nn.Module):
    """Attention of every position to all positions, except padding, of a memory: the encoder's output.

    states [batch, time, model_size], memory [batch, memory time, model_size], padding [batch, memory time] -> the shape
    of the states. One product makes keys and values.
    """

    def __init__(self, model_size: int, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries = Linear(model_size, num_heads * head_size)
        self.keys_values = Linear(model_size, 2 * num_heads * head_size)
        self.output = Linear(num_heads * head_size, model_size)

    def forward(self, states: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        return self.attend(states, *self.project(memory), padding)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory's keys and values, each [batch, heads, memory time, head size]."""
        keys, values = split_heads(self.keys_values(memory), 2, self.num_heads)
        return keys, values

    def attend(self, states: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> Tensor:
        """Attend to a memory with these keys and values."""
        (queries,) = split_heads(self.queries(states), 1, self.num_heads)
        mixed = F.scaled_dot_product_attention(queries, keys, values, _make_mask(padding))
        output: Tensor = self.output(join_heads(mixed))
        return output


def split_heads(joint: Tensor, num_parts: int, num_heads: int) -> Tensor:
    """Split heads: [batch, time, parts x channels] -> [parts, batch, heads, time, head size]."""
    parts: Tensor = joint.unflatten(-1, (num_parts, num_heads, -1))
    return parts.permute(2, 0, 3, 1, 4)


def join_heads(heads: Tensor) -> Tensor:
    """Join heads: [batch, heads, time, head size] -> [batch, time, channels]."""
    return heads.transpose(1, 2).flatten(2)


def _make_mask(padding: Tensor) -> Tensor:
    """Turn padding, bool [batch, time], into a mask [batch, 1, 1, time] that is True at the keys to attend to."""
    return ~padding[:, None, None, :]
