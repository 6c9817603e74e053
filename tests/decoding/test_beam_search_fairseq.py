"""Our layers and fairseq's own Transformer, given the same weights, are translated alike by fairseq's search."""

import math

import pytest
import torch

from gpipe._compat.fairseq import import_fairseq
from gpipe.decoding.beam_search import BeamSearch
from gpipe.models import translation_transformer
from tests.models.test_translation_fairseq import (
    FEEDFORWARD,
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    copy_weights,
    make_theirs,
)
from tests.models.translation_case import END, PADDING

SOURCES = [[5, 9, 21, 7, 7], [28], [4, 4, 17, 6, 11, 12, 13], [8, 29, 15]]
LONGEST = 9


@pytest.mark.parametrize("length_penalty", [0.6, 1.0])
def test_their_model_finds_what_ours_finds(length_penalty: float) -> None:
    ours = translation_transformer(
        LAYERS, FEEDFORWARD, HEADS, vocabulary_size=VOCABULARY, model_size=WIDTH, head_size=WIDTH // HEADS, tied="none"
    )
    theirs = make_theirs("none")
    copy_weights(ours, theirs)
    ours, theirs = ours.double().eval(), theirs.double().eval()
    generator = import_fairseq("fairseq.sequence_generator").SequenceGenerator(
        [theirs],
        theirs.decoder.dictionary,
        beam_size=3,
        max_len_b=LONGEST,
        len_penalty=length_penalty,
        unk_penalty=math.inf,
        tokens_to_suppress=("<s>",),
    )
    lengths = torch.tensor([len(source) + 1 for source in SOURCES])
    source = torch.full((len(SOURCES), int(lengths.max())), PADDING)
    for row, tokens in zip(source, SOURCES, strict=True):
        row[: len(tokens) + 1] = torch.tensor([*tokens, END])
    expected = generator.generate(None, {"net_input": {"src_tokens": source, "src_lengths": lengths}})
    search = BeamSearch(ours, 3, length_penalty=length_penalty, max_length_a=0, max_length_b=LONGEST)
    for found, theirs_found in zip(search.search(SOURCES), expected, strict=True):
        assert [[*one.tokens, END] for one in found] == [one["tokens"].tolist() for one in theirs_found]
        assert [one.score for one in found] == pytest.approx([float(one["score"]) for one in theirs_found], rel=1e-6)
