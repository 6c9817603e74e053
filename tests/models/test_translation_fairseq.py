"""T(L, H, A) is fairseq's TransformerModelBase with normalize_before, given the same weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe._compat.fairseq import import_fairseq
from gpipe.models import translation_transformer
from tests.models.translation_case import END, PADDING, SOURCES, TARGETS, pad, shift

LAYERS, WIDTH, FEEDFORWARD, HEADS = 2, 24, 40, 3
VOCABULARY = 30


def make_theirs(tied: str) -> Any:
    """Build fairseq's model. It cannot share the tables of the inputs alone: that tie is made as its "all" is."""
    transformer = import_fairseq("fairseq.models.transformer")
    dictionary = import_fairseq("fairseq.data").Dictionary()
    for index in range(len(dictionary), VOCABULARY):
        dictionary.add_symbol(str(index))
    assert (dictionary.pad(), dictionary.eos(), len(dictionary)) == (PADDING, END, VOCABULARY)
    config = transformer.TransformerConfig(dropout=0.0)
    for half in (config.encoder, config.decoder):
        half.embed_dim, half.ffn_embed_dim, half.layers, half.attention_heads = WIDTH, FEEDFORWARD, LAYERS, HEADS
        half.normalize_before = True
    config.decoder.input_dim = config.decoder.output_dim = WIDTH
    config.share_decoder_input_output_embed = tied == "output"
    config.share_all_embeddings = tied == "all"
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    theirs = transformer.TransformerModelBase.build_model(config, task)
    if tied == "inputs":
        theirs.decoder.embed_tokens = theirs.encoder.embed_tokens
    return theirs


@torch.no_grad()
def copy_weights(ours: nn.Sequential, theirs: Any) -> None:
    """Draw all of ours anew, also norms and biases, and give fairseq's model the same."""
    generator = torch.Generator().manual_seed(2)
    for parameter in ours.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    source, *encoder = ours[: LAYERS + 1]
    target, *decoder = ours[LAYERS + 1 : -2]
    theirs.encoder.embed_tokens.weight.copy_(source.embedding.weight)
    theirs.decoder.embed_tokens.weight.copy_(target.embedding.weight)
    theirs.decoder.output_projection.weight.copy_(ours[-1].weight)
    theirs.encoder.layer_norm.load_state_dict(target.memory_norm.state_dict())
    theirs.decoder.layer_norm.load_state_dict(ours[-2].norm.state_dict())
    for our, their in zip(encoder + decoder, [*theirs.encoder.layers, *theirs.decoder.layers], strict=True):
        attention = their.self_attn
        copy_rows(our.attention.queries_keys_values, attention.q_proj, attention.k_proj, attention.v_proj)
        attention.out_proj.load_state_dict(our.attention.output.state_dict())
        their.self_attn_layer_norm.load_state_dict(our.attention_norm.state_dict())
        their.fc1.load_state_dict(our.widen.state_dict())
        their.fc2.load_state_dict(our.narrow.state_dict())
        their.final_layer_norm.load_state_dict(our.feedforward_norm.state_dict())
    for our, their in zip(decoder, theirs.decoder.layers, strict=True):
        copy_rows(our.memory_attention.queries, their.encoder_attn.q_proj)
        copy_rows(our.memory_attention.keys_values, their.encoder_attn.k_proj, their.encoder_attn.v_proj)
        their.encoder_attn.out_proj.load_state_dict(our.memory_attention.output.state_dict())
        their.encoder_attn_layer_norm.load_state_dict(our.memory_attention_norm.state_dict())


def copy_rows(joint: nn.Linear, *parts: nn.Linear) -> None:
    """Give each of fairseq's projections its rows of our one product."""
    for part, weight, bias in zip(parts, joint.weight.chunk(len(parts)), joint.bias.chunk(len(parts)), strict=True):
        part.weight.copy_(weight)
        part.bias.copy_(bias)


# fairseq's own: it gives torch masks of two types.
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tied", ["none", "inputs", "output", "all"])
def test_memory_states_and_logits_are_fairseqs_at_all_positions_but_padding(tied: str, training: bool) -> None:
    torch.manual_seed(0)
    ours = translation_transformer(
        LAYERS,
        FEEDFORWARD,
        HEADS,
        vocabulary_size=VOCABULARY,
        model_size=WIDTH,
        head_size=WIDTH // HEADS,
        tied=tied,
    )
    theirs = make_theirs(tied)
    copy_weights(ours, theirs)
    ours.train(training)
    theirs.train(training)

    for sources, targets in ((SOURCES, TARGETS), (SOURCES[:1], TARGETS[1:2]), ([[7] * 40, [8]], [[9], [10] * 50])):
        source, previous = pad(sources), pad([shift(target) for target in targets])
        _, memory, _ = ours[: LAYERS + 2]((source, previous))
        states = ours[:-1]((source, previous))
        their_memory = theirs.encoder(source, (source != PADDING).sum(1))["encoder_out"][0].transpose(0, 1)
        their_states, _ = theirs(source, (source != PADDING).sum(1), previous, features_only=True)
        their_logits, _ = theirs(source, (source != PADDING).sum(1), previous)
        close(memory[source != PADDING], their_memory[source != PADDING])
        close(states[previous != PADDING], their_states[previous != PADDING])
        close(ours[-1](states)[previous != PADDING], their_logits[previous != PADDING])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
