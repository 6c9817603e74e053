"""T(L, H, A), the paper's translation model (section 5): an encoder and a decoder as one sequence of layers.

    0                   embedding of the source
    1 ... L             layers of the encoder
    L + 1               the encoder's last norm, and embedding of the target
    L + 2 ... 2L + 1    layers of the decoder
    2L + 2              the decoder's last norm
    2L + 3              softmax layer, without bias

The parameters, with model dimension 1,024, attention channels 64 x A, biases in all other fully connected layers, and
two tables (the embeddings are one) of 64,000 rows, beside the paper's:

    T(6, 8192, 16)        408,145,920    408M
    T(24, 8192, 16)     1,239,355,392    1.24B
    T(12, 16384, 32)    1,239,171,072    1.24B
    T(32, 16384, 32)    3,085,996,032    3.09B
    T(64, 16384, 32)    6,040,915,968    6.04B

65,536 rows, the other reading of the paper's 64k, would make the first 411M.

Deviation: the paper does not say where its layer norms stand, nor which tables are one; the norms are in front of what
they normalise, with one more behind each half (fairseq's normalize_before). It does not say either by which number of
layers the feed-forward weights are scaled down: by L, the layers of one half.
"""

from torch import nn

from gpipe.models.checks import at_least, probability
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
    vocabulary_size]; any batch and times. Padding stands behind each sentence. `previous` is the target one position
    later, so that logits[:, t] are those of target[:, t].

    Args:
        num_layers: L, of the encoder and of the decoder each.
        feedforward_size: H.
        num_heads: A; all have num_heads x head_size channels together, whatever the model_size.
        vocabulary_size: of source and target.
        model_size: the width of the states.
        head_size: channels a head.
        dropout: of the embeddings and of what each part of a layer adds.
        tied: which tables are one parameter: "none"; "inputs", those of the source and of the target; "output", those
            of the target and of the softmax layer; "all".
        scale_feedforward: start with feed-forward weights of 1 / num_layers times their usual size, after Fixup (Zhang
            et al. 2019), so that a deep model can be trained.
        logit_limit: the largest magnitude of a logit in training mode; None for any.
        soft_limit: approach the limit, as limit x tanh(logit / limit), instead of cutting off there.
        padding_index: the token that fills up the shorter sentences of a batch.

    Raises:
        ValueError: a wrong value.
    """
    _check_sizes(num_layers, feedforward_size, num_heads, vocabulary_size, model_size, head_size, padding_index)
    _check_options(dropout, tied, logit_limit, soft_limit)
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


def _check_sizes(
    num_layers: int,
    feedforward_size: int,
    num_heads: int,
    vocabulary_size: int,
    model_size: int,
    head_size: int,
    padding_index: int,
) -> None:
    at_least("num_layers", num_layers, 1)
    at_least("feedforward_size", feedforward_size, 1)
    at_least("num_heads", num_heads, 1)
    at_least("vocabulary_size", vocabulary_size, 2)
    at_least("head_size", head_size, 1)
    if model_size < 2 or model_size % 2:
        raise ValueError(f"model_size is {model_size}, expected an even number: every sine has a cosine.")
    if not 0 <= padding_index < vocabulary_size:
        raise ValueError(
            f"padding_index is {padding_index}, expected a token of the vocabulary, 0 to {vocabulary_size - 1}: give "
            "the one that the batches are filled up with."
        )


def _check_options(dropout: float, tied: str, logit_limit: float | None, soft_limit: bool) -> None:
    probability("dropout", dropout)
    if tied not in TIES:
        raise ValueError(f"tied is {tied!r}, expected one of {', '.join(TIES)}: say which tables are one.")
    if logit_limit is not None and not logit_limit > 0:
        raise ValueError(f"logit_limit is {logit_limit}, expected a number above 0: give None for no limit.")
    if soft_limit and logit_limit is None:
        raise ValueError("soft_limit is True, expected False where logit_limit is None: give a limit to approach.")
