"""Attention of a sequence to itself."""

from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.linear import Linear


class CausalSelfAttention(nn.Module):
    """Attention with several heads of every position to itself and to those before it (Vaswani et al. 2017).

    [batch, time, model_size] -> the same. Queries, keys and values come from one product with three times the width.
    """

    def __init__(self, model_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = Linear(model_size, 3 * model_size)
        self.output = Linear(model_size, model_size)

    def forward(self, states: Tensor) -> Tensor:
        joint: Tensor = self.queries_keys_values(states)
        # [batch, time, 3 x model] -> three of [batch, heads, time, model / heads]
        queries, keys, values = joint.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output
