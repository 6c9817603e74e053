"""Mini-batches of pairs of sentences: their cut, order, padding and share for each replica."""

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe.data import (
    LanguagePairs,
    ParallelCorpus,
    TranslationBatch,
    TranslationLoader,
    open_corpus,
    sampling_probabilities,
)
from gpipe.data.text.sentences import Sentences
from gpipe.data.text.tokenizer import END, PADDING
from gpipe.data.text.translation_loader import cut_by_tokens
from tests.data.text.small_text import embedded_tokenizer, made_up_corpus

PAIR = st.tuples(st.integers(1, 12), st.integers(1, 12))
LENGTHS = st.dictionaries(st.sampled_from("abc"), st.lists(PAIR, min_size=1, max_size=25), min_size=1)
MOST = 13  # tokens of the longest sentence that PAIR makes, with END
ASCENDING = st.lists(st.integers(1, 30), min_size=1, max_size=80).map(sorted)


def loader(corpus: ParallelCorpus, batch_size: int = 60, seed: int = 3, **options) -> TranslationLoader:
    return TranslationLoader(corpus, batch_size, seed, **{"shuffle": True, "temperature": 2.0} | options)


def rows(batches: list[TranslationBatch]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield (language index, source, target) of every sentence, without padding."""
    for (source, _), targets in batches:
        for index in range(len(source)):
            sides = (source[index], targets["tokens"][index])
            yield (int(targets["language"][index]), *(tuple(side[side != PADDING].tolist()) for side in sides))


def whole(corpus: ParallelCorpus) -> Counter:
    return Counter(
        (number, *(tuple(side.tolist()) for side in corpus.pair(language, index)))
        for number, language in enumerate(corpus.languages)
        for index in range(len(corpus.pairs(language)))
    )


def assert_equal(ours: list[TranslationBatch], theirs: list[TranslationBatch]) -> None:
    assert len(ours) == len(theirs)
    for (inputs, targets), (other_inputs, other_targets) in zip(ours, theirs, strict=True):
        assert all(one.equal(other) for one, other in zip(inputs, other_inputs, strict=True))
        assert targets.keys() == other_targets.keys() and all(targets[key].equal(other_targets[key]) for key in targets)


def assert_well_made(batch: TranslationBatch, batch_size: int) -> None:
    (source, previous), targets = batch
    tokens = targets["tokens"]
    assert {tensor.dtype for tensor in (source, previous, *targets.values())} == {torch.int64}
    assert previous.shape == tokens.shape and len(source) == len(tokens) == len(targets["language"])
    assert len(source) * max(source.shape[1], tokens.shape[1]) <= batch_size
    for side in (source, tokens):
        lengths = (side != PADDING).sum(1)
        assert lengths.max() == side.shape[1]  # not wider than its longest sentence
        for row, length in zip(side, lengths.tolist(), strict=True):  # all of it on the left, END last
            assert (row[:length] != PADDING).all() and row[length - 1] == END
    for before, after in zip(previous, tokens, strict=True):
        length = int((after != PADDING).sum())
        assert before.tolist() == [END, *after[: length - 1].tolist(), *[PADDING] * (len(after) - length)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(MOST, 200))
def test_evaluation_shows_every_pair_once_by_length(lengths, batch_size: int) -> None:
    corpus = made_up_corpus(lengths)
    each = loader(corpus, batch_size, shuffle=False)
    batches = list(each)
    assert len(batches) == len(each)
    assert Counter(rows(batches)) == whole(corpus)
    longest = [max(len(source), len(target)) for _, source, target in rows(batches)]
    assert longest == sorted(longest)
    for batch in batches:
        assert_well_made(batch, batch_size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(MOST, 200), st.integers(0, 5), st.floats(0.5, 9))
def test_training_mini_batches_are_as_many_as_said_and_well_made(
    lengths, batch_size: int, epoch: int, temperature
) -> None:
    corpus = made_up_corpus(lengths)
    each = loader(corpus, batch_size, temperature=temperature)
    each.set_epoch(epoch)
    batches = list(each)
    tokens = sum(max(len(source), len(target)) * times for (_, source, target), times in whole(corpus).items())
    assert len(batches) == len(each) == max(1, tokens // batch_size)
    assert set(rows(batches)) <= whole(corpus).keys()
    for batch in batches:
        assert_well_made(batch, batch_size)
    again = loader(corpus, batch_size, temperature=temperature)
    again.set_epoch(epoch)
    assert_equal(list(again), batches)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(2, 3), st.integers(0, 60))
def test_replicas_share_the_mini_batches_of_one(lengths, num_replicas: int, spare: int) -> None:
    corpus = made_up_corpus(lengths | {"d": [(2, 2)] * 2 * num_replicas})  # enough for each of them
    parts = [loader(corpus, 40 + spare, replica_index=i, num_replicas=num_replicas) for i in range(num_replicas)]
    batches = [list(part) for part in parts]
    assert {len(part) for part in batches} == {len(parts[0])}
    for same in zip(*batches, strict=True):
        joined = [_interleave([part[0][side] for part in same]) for side in (0, 1)]
        targets = {key: _interleave([part[1][key] for part in same]) for key in ("tokens", "language")}
        assert all(len(part[0][0]) for part in same)
        assert_well_made(((joined[0], joined[1]), targets), 40 + spare)


def _interleave(parts: list[torch.Tensor]) -> torch.Tensor:
    """Put row i of part r into place i x R + r, the inverse of [r::R]."""
    joined = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for index, part in enumerate(parts):
        joined[index :: len(parts)] = part
    return joined


@pytest.fixture(scope="module")
def corpus() -> ParallelCorpus:
    """Return three languages of very unequal size from the embedded corpus."""
    settings = {"tokenizer": embedded_tokenizer(), "languages": ["cs", "fy", "zu"], "max_tokens": 120}
    return open_corpus("multilingual_embedded", "train", **settings)


def test_replicas_of_a_training_epoch_get_the_mini_batches_of_one_process(corpus: ParallelCorpus) -> None:
    alone = list(loader(corpus, 600))
    parts = [list(loader(corpus, 600, replica_index=index, num_replicas=2)) for index in (0, 1)]
    sizes = [len(source) for (source, _), _ in alone]
    assert min(sizes) >= 2 and len(alone) > 10
    for batch, first, second in zip(alone, *parts, strict=True):
        for key in ("tokens", "language"):
            assert torch.equal(batch[1][key][0::2], first[1][key]) and torch.equal(batch[1][key][1::2], second[1][key])
        for side in (0, 1):
            assert torch.equal(batch[0][side][0::2], first[0][side])


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_goes_on_exactly(corpus: ParallelCorpus, shuffle: bool) -> None:
    each = loader(corpus, 600, shuffle=shuffle)
    each.set_epoch(4)
    batches = list(each)
    for start in (1, len(each) - 1, len(each)):
        resumed = loader(corpus, 600, shuffle=shuffle)
        resumed.set_epoch(4)
        resumed.batch_numbers = range(start, len(resumed))
        assert_equal(list(resumed), batches[start:])
        resumed.batch_numbers = range(start, len(resumed), 2)
        assert_equal(list(resumed), batches[start::2])
    resumed.set_epoch(0)
    assert resumed.batch_numbers is None
    resumed.batch_numbers = [len(each)]
    with pytest.raises(ValueError, match=rf"must ascend and lie in 0 to {len(each) - 1}$"):
        next(iter(resumed))


def test_epochs_and_seeds_differ_and_evaluation_does_not(corpus: ParallelCorpus) -> None:
    first, other_seed, next_epoch = loader(corpus, 600), loader(corpus, 600, seed=4), loader(corpus, 600)
    next_epoch.set_epoch(1)
    for other in (other_seed, next_epoch):
        assert Counter(rows(list(first))) != Counter(rows(list(other)))
    evaluations = [loader(corpus, 600, seed, shuffle=False) for seed in (3, 4)]
    evaluations[1].set_epoch(7)
    assert_equal(*(list(each) for each in evaluations))


def test_languages_come_as_often_as_the_temperature_says(corpus: ParallelCorpus) -> None:
    for temperature in (1.0, 1 / 0.7, 5.0):
        expected = sampling_probabilities(corpus.num_pairs(), temperature)
        each = loader(corpus, 600, temperature=temperature)
        drawn = np.zeros(3)
        for epoch in range(12):
            each.set_epoch(epoch)
            drawn += np.bincount([language for language, _, _ in rows(list(each))], minlength=3)
        np.testing.assert_allclose(drawn / drawn.sum(), expected, atol=0.02)


def test_pairs_of_a_language_come_equally_often(corpus: ParallelCorpus) -> None:
    each = loader(corpus, 600, temperature=100.0)
    seen: Counter = Counter()
    for epoch in range(8):
        each.set_epoch(epoch)
        seen.update(row for row in rows(list(each)) if row[0] == 2)
    assert len(seen) == len(corpus.pairs("zu")) and min(seen.values()) > 0.6 * max(seen.values())


def test_there_is_little_padding_and_the_order_is_not_by_length(corpus: ParallelCorpus) -> None:
    batches = list(loader(corpus, 600))
    real = sum(int((side != PADDING).sum()) for (source, _), targets in batches for side in (source, targets["tokens"]))
    total = sum(source.numel() + previous.numel() for (source, previous), _ in batches)
    widths = [source.shape[1] for (source, _), _ in batches]
    assert real / total > 0.75 and widths != sorted(widths)


def test_the_global_generators_stay_as_they_are(corpus: ParallelCorpus) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    next(iter(loader(corpus, 600)))
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])


def test_all_languages_in_memory_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = {"b": [[7], [8, 9], [4]], "a": [[5, 6, 4], [6]], "c": [[9, 9]]}
    pairs = {language: LanguagePairs(*[Sentences.pack(side, 10)] * 2) for language, side in sides.items()}
    corpus = ParallelCorpus(pairs, 10, max_pairs=2)
    alone = [each for language in "abc" for each in corpus.pairs(language).targets]
    pad, reads = Sentences.pad, []
    monkeypatch.setattr(Sentences, "pad", lambda *arguments: reads.append(arguments) or pad(*arguments))
    found = corpus.pad("targets", np.array([4, 0, 3, 1]), 5)
    assert len(reads) == 1
    for row, number in zip(found, (4, 0, 3, 1), strict=True):
        assert row.tolist() == [*alone[number], *[PADDING] * (5 - len(alone[number]))]
    assert found[:2].tolist() == [[9, 9, END, PADDING, PADDING], [5, 6, 4, END, PADDING]]


def test_an_unknown_language_is_refused(corpus: ParallelCorpus) -> None:
    with pytest.raises(ValueError, match=f"^unknown language 'xx': choose one of {', '.join(corpus.languages)}$"):
        corpus.pairs("xx")


def test_waiting_is_counted(corpus: ParallelCorpus) -> None:
    each = loader(corpus, 600)
    next(iter(each))
    assert 0 < each.wait_seconds < 60


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"batch_size": 10},
            "trainer.batch_size is 10 tokens, less than the longest sentence of 11 tokens: choose a larger",
        ),
        (
            {"batch_size": 21, "num_replicas": 2},
            "trainer.batch_size is 21 tokens, less than the longest sentence of 11 tokens x 2 replicas: choose",
        ),
        (
            {"batch_size": 10, "shuffle": False},
            "trainer.evaluation.batch_size is 10 tokens, less than the longest sentence of 11 tokens: choose a larger",
        ),
        ({"num_replicas": 2, "shuffle": False}, "replicas share no mini-batch of an evaluation: give each of them its"),
        ({"num_replicas": 4}, "3 pairs are too few for 4 replicas: choose fewer"),
        ({"seed": -1}, "seed -1 must not be negative"),
        ({"replica_index": 1}, "replica_index 1 must lie in 0 to num_replicas - 1 = 0"),
    ],
)
def test_wrong_settings_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        loader(made_up_corpus({"a": [(10, 3), (2, 2)], "b": [(1, 1)]}), **options)


def test_the_runs_of_the_docstring() -> None:
    lengths = np.array([1, 1, 2, 2, 2, 3, 4, 4, 5, 7, 7, 9], np.int32)
    assert cut_by_tokens(lengths, 18) == [(0, 6), (6, 9), (9, 11), (11, 12)]


@settings(deadline=None, derandomize=True)
@given(ASCENDING, st.integers(30, 200))
def test_each_run_is_as_long_as_it_may_be(lengths: list[int], batch_size: int) -> None:
    bounds = cut_by_tokens(np.array(lengths, np.int32), batch_size)
    assert [index for start, end in bounds for index in range(start, end)] == list(range(len(lengths)))
    for start, end in bounds:
        assert (end - start) * lengths[end - 1] <= batch_size
        assert end == len(lengths) or (end + 1 - start) * lengths[end] > batch_size
