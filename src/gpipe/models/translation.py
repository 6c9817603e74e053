"""T(L, H, A), the paper's translation model (section 5): an encoder and a decoder as one sequence of layers.

    0                   embedding of the source
    1 ... L             layers of the encoder
    L + 1               the encoder's last norm, and the embedding of the target
    L + 2 ... 2L + 1    layers of the decoder
    2L + 2              the decoder's last norm
    2L + 3              softmax layer, without bias

Our numbers of parameters beside the paper's, with model dimension 1,024, attention channels 64 x A, biases in all other
fully connected layers and 64,000 rows per table. `tied` sets the number of tables: 3 with "none", 2 with "inputs" or
"output", 1 with "all".

                        paper      3 tables         2 tables         1 table
    T(6, 8192, 16)      400M     473,681,920      408,145,920      342,609,920
    T(24, 8192, 16)     1.3B   1,304,891,392    1,239,355,392    1,173,819,392
    T(12, 16384, 32)    1.3B   1,304,707,072    1,239,171,072    1,173,635,072
    T(32, 16384, 32)    3B     3,151,532,032    3,085,996,032    3,020,460,032
    T(64, 16384, 32)    6B     6,106,451,968    6,040,915,968    5,975,379,968

No column rounds to all five: the first misses 400M, the second both 1.3B, the third all but 3B and 6B.

A layer norm follows each half, as with fairseq's normalize_before.

Deviation: the paper says only that the feed-forward layers' initialisation is scaled down with the number of layers,
after Fixup; we scale both matrices of each feed-forward layer by 1 / L, with L layers in each half. Fixup itself (Zhang
et al. 2019) scales the weight layers inside a residual branch of m layers by L^(-1 / (2m - 2)), starts the last of them
at zero, and adds scalar biases and multipliers.

Deviation: the paper does not say whether logits are clipped in evaluation; we clip them hard, and only in training, as
Lingvo does.
"""

from torch import nn

from gpipe.models.checks import check_at_least, check_probability
from gpipe.models.translation_layers import (
    DecoderLayer,
    DecoderNorm,
    EncoderLayer,
    SourceEmbedding,
    TargetEmbedding,
    TokenSoftmax,
)

TIES = ("none", "inputs", "output", "all")


def translation_transformer(
    num_layers: int = 6,
    feedforward_size: int = 8192,
    num_heads: int = 16,
    *,
    vocabulary_size: int = 64_000,
    model_size: int = 1024,
    head_size: int = 64,
    dropout: float = 0.0,
    tied: str = "inputs",
    scale_feedforward: bool = True,
    logit_limit: float | None = None,
    soft_limit: bool = False,
    padding_index: int = 1,
) -> nn.Sequential:
    """Build T(num_layers, feedforward_size, num_heads), which predicts the next token of a translation.

    (source int64 [batch, source time], previous int64 [batch, target time]) -> logits [batch, target time,
    vocabulary_size]; any batch and times. Padding follows each sentence. `previous` is the target shifted right by one
    position: logits[:, t] predict target[:, t].

    Args:
        num_layers: L, in the encoder and again in the decoder.
        feedforward_size: H.
        num_heads: A. The heads have num_heads x head_size channels, which need not equal model_size.
        vocabulary_size: shared by source and target.
        model_size: the width of the states.
        head_size: channels per head.
        dropout: the probability after the embeddings and after each branch of a layer.
        tied: which tables share one parameter: "none"; "inputs" (source and target); "output" (target and softmax
            layer); "all".
        scale_feedforward: divide the initial feed-forward weights by num_layers, so that deep models train.
        logit_limit: the largest magnitude of a logit in training mode; None for no limit.
        soft_limit: make logits limit x tanh(logit / limit) instead of clipping them.
        padding_index: the token that pads the shorter sentences of a batch.

    Raises:
        ValueError: a value is out of range.
    """
    check_at_least("num_layers", num_layers, 1)
    check_at_least("feedforward_size", feedforward_size, 1)
    check_at_least("num_heads", num_heads, 1)
    check_at_least("vocabulary_size", vocabulary_size, 2)
    check_at_least("head_size", head_size, 1)
    if model_size < 2 or model_size % 2:
        raise ValueError(
            f"model_size is {model_size}, expected an even number: positions take as many sines as cosines."
        )
    if not 0 <= padding_index < vocabulary_size:
        raise ValueError(
            f"padding_index is {padding_index}, expected a token of the vocabulary, 0 to {vocabulary_size - 1}: give "
            "the one that pads the batches."
        )
    check_probability("dropout", dropout)
    if tied not in TIES:
        raise ValueError(f"tied is {tied!r}, expected one of {', '.join(TIES)}: choose which tables to tie.")
    if logit_limit is not None and not logit_limit > 0:
        raise ValueError(f"logit_limit is {logit_limit}, expected a number above 0: give None for no limit.")
    if soft_limit and logit_limit is None:
        raise ValueError("soft_limit is True, expected False without a logit_limit: give a limit to approach.")
    sizes = (model_size, feedforward_size, num_heads, head_size, dropout, 1 / num_layers if scale_feedforward else 1.0)
    source = SourceEmbedding(vocabulary_size, model_size, dropout, padding_index)
    encoder = [EncoderLayer(*sizes) for _ in range(num_layers)]
    target = TargetEmbedding(vocabulary_size, model_size, dropout, padding_index)
    decoder = [DecoderLayer(*sizes) for _ in range(num_layers)]
    softmax = TokenSoftmax(model_size, vocabulary_size, logit_limit, soft_limit=soft_limit)
    if tied in ("inputs", "all"):
        target.embedding.weight = source.embedding.weight
    if tied in ("output", "all"):
        softmax.weight = target.embedding.weight
    return nn.Sequential(source, *encoder, target, *decoder, DecoderNorm(model_size), softmax)
