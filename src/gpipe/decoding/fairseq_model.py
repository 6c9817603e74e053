"""A trained sequence of layers as a model for fairseq's SequenceGenerator: an encoder and a decoder.

    layers   0 ... L    encoder    once per batch
             L + 1      its norm: encoder; its embedding: decoder
             L + 2 ...  decoder    once per token, only for the newest position

A row of the decoder is a hypothesis. Every sentence has the same number of hypotheses, in consecutive rows, and one
memory. Source of the interface: fairseq 0.12.2, sequence_generator.py, EnsembleModel.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gpipe.decoding.cached_layer import CachedLayer, find_remaining
from gpipe.models.translation_layers import DecoderLayer, TargetEmbedding


@dataclass(frozen=True)
class Memory:
    """The encoder's output for a batch of sentences.

    Attributes:
        states: [sentences, time, model_size].
        padding: bool [sentences, time].
        num_rows: hypotheses per sentence; None before the first reordering.
    """

    states: Tensor
    padding: Tensor
    num_rows: int | None = None


class FairseqModel(nn.Module):
    """Wraps the layers of a `translation_transformer` and puts them into evaluation mode."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        split = next((i for i, layer in enumerate(layers) if isinstance(layer, TargetEmbedding)), None)
        if split is None:
            raise ValueError("no layer embeds a target, so this is not a translation model: load a checkpoint of one.")
        target = layers[split]
        assert isinstance(target, TargetEmbedding)
        parts = list(layers)
        self.encoder = Encoder(nn.Sequential(*parts[:split]), target)
        self.decoder = Decoder(target, parts[split + 1 :])
        self.eval()

    def get_normalized_probs(
        self, net_output: tuple[Tensor, None], log_probs: bool = True, sample: None = None
    ) -> Tensor:
        """Return the log-probabilities.

        Raises:
            ValueError: the logits are not finite.
        """
        found = net_output[0].log_softmax(dim=-1)
        # One NaN or infinite logit makes its whole row NaN, which fairseq would treat as impossible tokens.
        if bool(found[..., 0].isnan().any()):
            raise ValueError("the model's logits are not finite, so it cannot translate: use another checkpoint.")
        return found


class Encoder(nn.Module):
    """The layers that see the source, and the norm after them."""

    def __init__(self, layers: nn.Sequential, target: TargetEmbedding) -> None:
        super().__init__()
        self.layers = layers
        self.norm = target.memory_norm

    def forward_torchscript(self, net_input: dict[str, Tensor]) -> Memory:
        """Encode source tokens, int64 [sentences, time]. fairseq prescribes the name; there is no TorchScript here."""
        source = net_input["src_tokens"]
        states, padding, _ = self.layers((source, source[:, :0]))
        return Memory(self.norm(states), padding)

    def reorder_encoder_out(self, memory: Memory, new_order: Tensor) -> Memory:
        """Follow the hypotheses: the first call gives each sentence its rows; later calls drop finished sentences."""
        if memory.num_rows is None:
            return replace(memory, num_rows=len(new_order) // len(memory.states))
        sentences = find_remaining(new_order, memory.num_rows)
        if len(sentences) == len(memory.states):
            return memory
        return replace(memory, states=memory.states[sentences], padding=memory.padding[sentences])


class Decoder(nn.Module):
    """The layers that see the target; each batch has its own caches."""

    def __init__(self, target: TargetEmbedding, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = copy.copy(target.embedding)  # a copy, because its first position changes
        self.first_position = target.embedding.first_position
        self.layers = nn.ModuleList(layers)

    def forward(
        self, tokens: Tensor, encoder_out: Memory, incremental_state: dict[str, list[Any]]
    ) -> tuple[Tensor, None]:
        """Return the logits [rows, 1, vocabulary_size] of the token after `tokens`, int64 [rows, time].

        `incremental_state` holds the layers, with caches of all tokens but the last; it starts empty.
        """
        if not incremental_state:
            cached = [CachedLayer(layer) if isinstance(layer, DecoderLayer) else layer for layer in self.layers]
            incremental_state["layers"] = cached
        self.embedding.first_position = self.first_position + tokens.shape[1] - 1
        payload: Any = self.embedding(tokens[:, -1:]), encoder_out.states, encoder_out.padding
        for layer in incremental_state["layers"]:
            payload = layer(payload)
        return payload, None

    def reorder_incremental_state_scripting(self, incremental_state: dict[str, list[Any]], new_order: Tensor) -> None:
        """Move the caches to the hypotheses' new rows."""
        for layer in incremental_state["layers"]:
            if isinstance(layer, CachedLayer):
                layer.reorder(new_order)
