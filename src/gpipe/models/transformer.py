"""The Transformer language model as a sequence of layers.

    0               embedding and positions
    1 ... L         layers
    last            softmax layer, not tied to the embedding

There is no norm before the softmax layer, so the number of parameters is that of the paper's Table 1.

Deviation: the paper does not say how a language model's weights start; ours start with small residual branches, else
the logits of deep models would be large, and the loss far above chance.
"""

from torch import nn

from gpipe.models.checks import check_at_least, check_probability
from gpipe.models.linear import Softmax
from gpipe.models.transformer_layers import Embedding, TransformerLayer


def transformer_lm(
    num_layers: int = 48,
    *,
    vocabulary_size: int = 32_000,
    model_size: int = 2048,
    feedforward_size: int = 8192,
    num_heads: int = 32,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build Transformer-L, which predicts each next token; by default Transformer-48 of the paper's Table 2.

    tokens int64 [batch, time] -> logits [batch, time, vocabulary_size]; any batch and time.

    Raises:
        ValueError: a value is out of range.
    """
    check_at_least("num_layers", num_layers, 1)
    check_at_least("vocabulary_size", vocabulary_size, 2)
    check_at_least("feedforward_size", feedforward_size, 1)
    check_at_least("num_heads", num_heads, 1)
    if model_size < 2 or model_size % 2 or model_size % num_heads:
        raise ValueError(
            f"model_size is {model_size}, expected an even multiple of num_heads={num_heads}: all heads have one "
            "size, and positions take as many sines as cosines."
        )
    check_probability("dropout", dropout)
    return nn.Sequential(
        Embedding(vocabulary_size, model_size, dropout),
        *(
            TransformerLayer(model_size, feedforward_size, num_heads, dropout, num_layers=num_layers)
            for _ in range(num_layers)
        ),
        Softmax(model_size, vocabulary_size),
    )
