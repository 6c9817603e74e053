"""Beam search against searches written by hand, on a tiny model in float64."""

import re
from itertools import product

import pytest
import torch
from torch import nn

from gpipe.decoding.beam_search import BeamSearch
from tests.decoding.tiny_translation import END, VOCABULARY, Favour, log_probabilities, score, sentences, tiny_layers


def greedy(layers: nn.Sequential, source: list[int], longest: int) -> list[int]:
    """Take the likeliest token each time, by the plain layers; at least one before END."""
    target: list[int] = []
    while len(target) < longest:
        found = log_probabilities(layers, source, target)[-1]
        found[[0, 1, 3]] = -torch.inf
        if not target:
            found[END] = -torch.inf
        if (token := int(found.argmax())) == END:
            break
        target.append(token)
    return target


def few_tokens(num_tokens: int) -> nn.Sequential:
    """A tiny model that can choose `num_tokens` tokens and END alone."""
    layers = tiny_layers(sharpness=1.5)
    softmax = layers[-1]
    softmax.register_forward_hook(lambda module, inputs, logits: Favour(num_tokens)(logits))
    return layers


@pytest.mark.parametrize("seed", range(3))
def test_one_beam_is_the_greedy_search(seed: int) -> None:
    layers, sources = tiny_layers(seed), sentences(6, seed)
    found = BeamSearch(layers, 1, max_length_a=0, max_length_b=9).translate(sources)
    for hypothesis, source in zip(found, sources, strict=True):
        assert hypothesis.tokens == greedy(layers, source, 9)
        assert hypothesis.score == pytest.approx(score(layers, source, hypothesis.tokens), rel=1e-6)
    assert len({len(hypothesis.tokens) for hypothesis in found}) > 1, "none of them ended by itself"


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 1.6])
def test_enough_beams_find_the_best_of_all_translations(length_penalty: float) -> None:
    layers, longest = few_tokens(3), 3
    every = [list(tokens) for length in range(1, longest + 1) for tokens in product((4, 5, 6), repeat=length)]
    search = BeamSearch(layers, len(every), length_penalty=length_penalty, max_length_a=0, max_length_b=longest)
    for source in sentences(3):
        (found,) = search.search([source])
        scores = {tuple(target): score(layers, source, target, length_penalty) for target in every}
        expected = sorted(every, key=lambda target: -scores[tuple(target)])
        assert [one.tokens for one in found] == expected
        for one in found:
            assert one.score == pytest.approx(scores[tuple(one.tokens)], rel=1e-6)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_sentences_in_batches_become_what_each_becomes_alone(num_beams: int) -> None:
    layers, sources = tiny_layers(), sentences(12, longest=20)
    alone = [BeamSearch(layers, num_beams).translate([source])[0] for source in sources]
    for batch_size in (1, 60, 10_000):
        together = BeamSearch(layers, num_beams, batch_size=batch_size).translate(sources)
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        assert [one.score for one in together] == pytest.approx([one.score for one in alone], rel=1e-6)


def test_a_wider_beam_finds_no_worse_scores_on_the_whole() -> None:
    layers, sources = tiny_layers(), sentences(20)
    narrow, wide = (BeamSearch(layers, beams, max_length=8).translate(sources) for beams in (1, 8))
    assert sum(one.score for one in wide) > sum(one.score for one in narrow)


def test_a_translation_ends_at_its_limit() -> None:
    layers = few_tokens(3)
    with torch.no_grad():
        layers[-1].weight[END] = 0
        layers[-1].weight[4:7] *= 20
    for options, longest in (({"max_length_a": 0.5, "max_length_b": 2}, 6), ({"max_length": 5}, 5)):
        found = BeamSearch(layers, 2, **options).translate(sentences(4, longest=8))
        assert max(len(one.tokens) for one in found) <= longest


def test_tokens_without_text_are_never_chosen() -> None:
    layers = tiny_layers()
    with torch.no_grad():
        layers[-1].weight[[0, 1, 3]] = 30 * layers[-1].weight[[0, 1, 3]]
    chosen = [
        token for hypotheses in BeamSearch(layers).search(sentences(8)) for one in hypotheses for token in one.tokens
    ]
    assert set(chosen).isdisjoint({0, 1, 2, 3}) and chosen


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([[5], []], "sentence 2 has no tokens, so there is nothing to translate: leave it out."),
        (
            [[5, VOCABULARY]],
            f"sentence 1 has the token {VOCABULARY}, outside the vocabulary of {VOCABULARY}: encode it",
        ),
        ([[-1]], "sentence 1 has the token -1, outside the vocabulary"),
    ],
)
def test_bad_input_is_one_sentence(sources: list[list[int]], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.*$"):
        BeamSearch(tiny_layers()).translate(sources)


def test_more_beams_than_tokens_are_refused() -> None:
    with pytest.raises(
        ValueError, match=f"num_beams is {VOCABULARY}, expected 1 to {VOCABULARY - 1}, the vocabulary's"
    ):
        BeamSearch(tiny_layers(), VOCABULARY)


def test_nothing_becomes_nothing() -> None:
    assert BeamSearch(tiny_layers()).translate([]) == []
