"""Transformers as sequences of layers.

    0               embedding and positions
    1 ... L         layers
    last            softmax layer, with a table of its own

No norm stands before the softmax layer: so the parameters are those of the paper's Table 1.
"""

from torch import nn

from gpipe.models.checks import at_least, probability
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
    """Build Transformer-L, which predicts the next token from all up to it, by default at the size of Tables 1 and 2.

    tokens int64 [batch, time] -> logits [batch, time, vocabulary_size]; any batch and time.
    Raises ValueError for a wrong value.
    """
    _check(num_layers, vocabulary_size, model_size, feedforward_size, num_heads, dropout)
    return nn.Sequential(
        Embedding(vocabulary_size, model_size, dropout),
        *(TransformerLayer(model_size, feedforward_size, num_heads, dropout) for _ in range(num_layers)),
        Softmax(model_size, vocabulary_size),
    )


def _check(
    num_layers: int, vocabulary_size: int, model_size: int, feedforward_size: int, num_heads: int, dropout: float
) -> None:
    at_least("num_layers", num_layers, 1)
    at_least("vocabulary_size", vocabulary_size, 2)
    at_least("feedforward_size", feedforward_size, 1)
    at_least("num_heads", num_heads, 1)
    if model_size < 2 or model_size % 2 or model_size % num_heads:
        raise ValueError(
            f"model_size is {model_size}, expected an even multiple of num_heads={num_heads}: every head has an equal "
            "part, and every sine a cosine."
        )
    probability("dropout", dropout)
