"""Beam search over a trained translation model, with fairseq's SequenceGenerator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe._compat.fairseq import import_fairseq
from gpipe.decoding.fairseq_model import FairseqModel

_GRAIN = 8  # tokens: sentences share a batch if their lengths round up to the same multiple of this


@dataclass(frozen=True)
class Hypothesis:
    """A translation.

    Attributes:
        tokens: the ids, without END.
        score: the sum of the tokens' log-probabilities / (number of tokens) ** length_penalty, both including END.
    """

    tokens: list[int]
    score: float


class BeamSearch:
    """Searches for the likeliest translations of many sentences.

    Apart from rounding, the translation of a sentence does not depend on the others. The search never chooses BEGIN or
    UNKNOWN, which have no text.

    Args:
        layers: a `translation_transformer`'s, on a real device; the search puts them into evaluation mode.
        num_beams: hypotheses per sentence, below the vocabulary's size; 1 is greedy.
        length_penalty: above 1 favours long translations, below 1 short ones.
        max_length_a, max_length_b: a sentence of n tokens has a translation of at most max_length_a x n' + max_length_b
            tokens without END, where n' is n rounded up to a multiple of 8.
        max_length: the most tokens of any translation.
        batch_size: the number of source tokens, padding included, to translate together.

    Raises:
        ValueError: the layers are not a translation model, or num_beams is out of range.
        FairseqMissing: fairseq is not installed.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        num_beams: int = 4,
        *,
        length_penalty: float = 1.0,
        max_length_a: float = 2.0,
        max_length_b: int = 16,
        max_length: int = 256,
        batch_size: int = 2048,
    ) -> None:
        self._model = FairseqModel(layers)
        self._device = next(layers.parameters()).device
        softmax = layers[-1]
        assert isinstance(softmax, nn.Linear)
        self._dictionary = _make_dictionary(softmax.out_features)
        if not 1 <= num_beams < len(self._dictionary):
            raise ValueError(
                f"num_beams is {num_beams}, expected 1 to {len(self._dictionary) - 1}, the vocabulary's size less 1: "
                "give another number."
            )
        self._num_beams, self._length_penalty = num_beams, length_penalty
        self._max_length_a, self._max_length_b, self._max_length = max_length_a, max_length_b, max_length
        self._batch_size = batch_size

    def translate(self, sentences: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """Return the best translation of each sentence, given its tokens without END.

        Raises:
            ValueError: a sentence has no tokens, or a token is outside the vocabulary.
        """
        return [hypotheses[0] for hypotheses in self.search(sentences)]

    def search(self, sentences: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        """Return the finished hypotheses of each sentence, best first."""
        _check_ids(sentences, len(self._dictionary))
        found: dict[int, list[Hypothesis]] = {}
        for limit, batch in self._make_batches(sentences):
            outputs = self._generate([sentences[index] for index in batch], limit)
            found.update(zip(batch, outputs, strict=True))
        return [found[index] for index in range(len(sentences))]

    def _make_batches(self, sentences: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield batches of similar lengths, longest first, each with the length limit of its translations."""
        grains: dict[int, list[int]] = {}
        for index, tokens in enumerate(sentences):
            grains.setdefault(math.ceil(len(tokens) / _GRAIN) * _GRAIN, []).append(index)
        for length, indices in sorted(grains.items(), reverse=True):
            limit = min(int(self._max_length_a * length + self._max_length_b), self._max_length)
            size = max(1, self._batch_size // (length + 1))
            indices.sort(key=lambda index: len(sentences[index]))
            for start in range(0, len(indices), size):
                yield limit, indices[start : start + size]

    def _generate(self, sentences: Sequence[Sequence[int]], limit: int) -> list[list[Hypothesis]]:
        """Search for translations of at most `limit` tokens for one batch."""
        dictionary = self._dictionary
        source = torch.full((len(sentences), max(map(len, sentences)) + 1), dictionary.pad())
        for row, tokens in zip(source, sentences, strict=True):
            row[: len(tokens) + 1] = torch.tensor([*tokens, dictionary.eos()])
        sequence_generator = import_fairseq("fairseq.sequence_generator")
        ensemble = sequence_generator.EnsembleModel([self._model])
        ensemble.has_incremental = True  # fairseq sets this only for decoders of its own class
        generator = sequence_generator.SequenceGenerator(
            ensemble,
            dictionary,
            beam_size=self._num_beams,
            max_len_a=0,
            max_len_b=limit,
            len_penalty=self._length_penalty,
            unk_penalty=math.inf,
            tokens_to_suppress=(dictionary.bos_word,),
        )
        outputs = generator.generate(None, {"net_input": {"src_tokens": source.to(self._device)}})
        return [
            [Hypothesis(one["tokens"][:-1].tolist(), float(one["score"])) for one in hypotheses]
            for hypotheses in outputs
        ]


def _make_dictionary(vocabulary_size: int) -> Any:
    """Make a fairseq dictionary of this size; the search uses only its special tokens, which equal ours."""
    dictionary = import_fairseq("fairseq.data").Dictionary()
    for token in range(len(dictionary), vocabulary_size):
        dictionary.add_symbol(str(token))
    return dictionary


def _check_ids(sentences: Sequence[Sequence[int]], vocabulary_size: int) -> None:
    for number, tokens in enumerate(sentences, start=1):
        if not tokens:
            raise ValueError(f"sentence {number} has no tokens, so there is nothing to translate: leave it out.")
        wrong = next((token for token in tokens if not 0 <= token < vocabulary_size), None)
        if wrong is not None:
            raise ValueError(
                f"sentence {number} has the token {wrong}, outside the vocabulary of {vocabulary_size}: encode it with "
                "the model's own tokenizer."
            )
