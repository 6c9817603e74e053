"""An epoch in shards: against a plan that holds everything in memory, resumed everywhere, and of 25 billion pairs."""

import gc
import tracemalloc
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpipe.data import LanguagePairs, ParallelCorpus, TranslationLoader, sampling_probabilities
from gpipe.data.randomness import make_epoch_generator, make_walk_generator
from gpipe.data.text import sentence_walk
from gpipe.data.text.parallel_corpus import Skipped
from gpipe.data.text.sentences import Sentences
from tests.data.text.small_text import made_up_corpus
from tests.data.text.test_translation_loader import assert_equal

SEED = 3
Pair = tuple[int, int]  # the number of a language, and of a pair in it


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_walk, "BLOCK_SIZE", 16)


def lengths_of(num_pairs: dict[str, int], seed: int = 0) -> dict[str, list[tuple[int, int]]]:
    generator = np.random.default_rng(seed)
    return {
        language: [tuple(each) for each in generator.integers(1, 12, (number, 2)).tolist()]
        for language, number in num_pairs.items()
    }


def loader(corpus: ParallelCorpus, **options) -> TranslationLoader:
    return TranslationLoader(corpus, 60, SEED, **{"shuffle": True, "temperature": 2.0, "shard_sentences": 50} | options)


def pairs_of(batch) -> list[Pair]:
    """Return which pairs a mini-batch of a made-up corpus has: the first token of its language says which."""
    (source, _), targets = batch
    return list(zip(targets["language"].tolist(), source[:, 0].tolist(), strict=True))


def whole_pass(language: int, number: int, size: int) -> list[int]:
    """Return a whole pass through a language: its blocks in random order, each in an order of its own."""
    if size <= 16:
        return make_walk_generator(SEED, language, number).permutation(size).tolist()
    generator = make_walk_generator(SEED, language, number, -(-size // 16))
    shift = int(generator.integers(size))
    blocks = generator.permutation(size // 16).tolist() + [size // 16] * (size % 16 > 0)
    steps = []
    for block in blocks:
        members = [(shift + row) % size for row in range(size)][16 * block : 16 * block + 16]
        key = (language, number, block) if block else (language, number)
        steps += [members[place] for place in make_walk_generator(SEED, *key).permutation(len(members))]
    assert sorted(steps) == list(range(size))
    return steps


def cut_one_by_one(lengths: list[int], batch_size: int) -> list[tuple[int, int]]:
    bounds = [(0, 0)]
    for index, length in enumerate(lengths):
        start = bounds[-1][0]
        if (index + 1 - start) * length > batch_size:
            bounds.append((index, index))
            start = index
        bounds[-1] = (start, index + 1)
    return bounds


def oracle(lengths: dict[str, list[tuple[int, int]]], epoch: int, num_shards: int) -> list[list[Pair]]:
    """Return the pairs of each mini-batch of an epoch, from lists of all steps from the first epoch on."""
    longest = [[max(pair) + 1 for pair in lengths[language]] for language in sorted(lengths)]
    probabilities = sampling_probabilities([len(each) for each in longest], 2.0)
    num_batches = sum(map(sum, longest)) // 60
    mean = probabilities @ [sum(each) / len(each) for each in longest]
    draws = num_batches * 60 / mean * probabilities
    firsts = make_walk_generator(SEED).random(len(draws))
    walks = [
        [row for number in range(99 + epoch) for row in whole_pass(language, number, len(each))]
        for language, each in enumerate(longest)
    ]
    batches = []
    for shard in range(num_shards):
        ends = [shard * num_batches // num_shards, (shard + 1) * num_batches // num_shards]
        wanted = ends[1] - ends[0]
        generator = make_epoch_generator(SEED, epoch, shard)
        start, stop = (epoch + end / num_batches for end in ends)
        stretch, bounds = 1.0, []
        while True:
            places = start, stop + (stretch - 1.0) * (stop - start)
            drawn = [
                (language, row)
                for language, walk in enumerate(walks)
                for row in walk[slice(*(int(place * draws[language] + firsts[language]) for place in places))]
            ]
            shuffled = [drawn[place] for place in generator.permutation(np.arange(len(drawn)))]
            both = [lengths[sorted(lengths)[language]] for language in range(len(walks))]
            order = sorted(shuffled, key=lambda pair: (longest[pair[0]][pair[1]], *both[pair[0]][pair[1]]))
            bounds = cut_one_by_one([longest[language][row] for language, row in order], 60)
            if len(bounds) >= wanted:
                break
            stretch *= 1.05 * wanted / len(bounds)
        assert Counter(pair for bound in bounds for pair in order[slice(*bound)]) == Counter(drawn)
        batches += [order[slice(*bounds[place])] for place in generator.permutation(len(bounds))[:wanted]]
    return batches


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(1, 60), st.integers(0, 5), st.integers(30, 200))
def test_an_epoch_is_the_plan_that_holds_everything_in_memory(seed, few: int, epoch: int, shard_sentences: int) -> None:
    lengths = lengths_of({"a": 300, "b": few, "c": 90}, seed)
    corpus = made_up_corpus(lengths)
    each = loader(corpus, shard_sentences=shard_sentences)
    each.set_epoch(epoch)
    first_tokens = {
        (number, int(corpus.pair(language, row)[0][0])): (number, row)
        for number, language in enumerate(corpus.languages)
        for row in range(len(corpus.pairs(language)))
    }
    found = [[first_tokens[pair] for pair in pairs_of(batch)] for batch in each]
    num_shards = each._num_shards
    assert num_shards > 1 or shard_sentences > 150
    assert found == oracle(lengths, epoch, num_shards)


def test_an_epoch_resumed_at_any_mini_batch_goes_on_exactly() -> None:
    corpus = made_up_corpus(lengths_of({"a": 300, "b": 7, "c": 90}))
    each = loader(corpus)
    assert each._num_shards > 2
    for epoch in (0, 3):
        each.set_epoch(epoch)
        batches = list(each)
        for start in range(len(each) + 1):
            resumed = loader(corpus)
            resumed.set_epoch(epoch)
            resumed.batch_numbers = range(start, len(resumed))
            assert_equal(list(resumed), batches[start:])


def test_a_resumed_epoch_plans_only_the_shards_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    each = loader(made_up_corpus(lengths_of({"a": 300, "b": 7, "c": 90})))
    planned = []
    plan = TranslationLoader._plan_shard
    monkeypatch.setattr(
        TranslationLoader, "_plan_shard", lambda self, *rest: planned.append(rest[1]) or plan(self, *rest)
    )
    each.batch_numbers = range(len(each) // 2, len(each))
    batches = iter(each)
    assert planned == []
    next(batches)
    assert len(planned) == 1 and planned[0] > 0
    assert len(list(batches)) == len(each) - len(each) // 2 - 1
    assert planned == list(range(planned[0], each._num_shards))


def test_languages_and_pairs_come_as_often_as_the_temperature_says() -> None:
    sizes = {"a": 300, "b": 40, "c": 90}
    corpus = made_up_corpus(lengths_of(sizes))
    seen: Counter[Pair] = Counter()
    each = loader(corpus)
    for epoch in range(40):
        each.set_epoch(epoch)
        for batch in each:
            seen.update(pairs_of(batch))
    by_language = [[count for (language, _), count in seen.items() if language == number] for number in range(3)]
    drawn = np.array([sum(counts) for counts in by_language])
    np.testing.assert_allclose(drawn / drawn.sum(), sampling_probabilities(list(sizes.values()), 2.0), atol=0.01)
    for counts, size in zip(by_language, sizes.values(), strict=True):
        assert len(counts) == size and np.std(counts) < 0.25 * np.mean(counts)


def test_a_large_seed_too_has_orders_of_its_own_for_each_shard() -> None:
    for seed in (0, 2**40):
        drawn = {
            tuple(make_epoch_generator(seed, epoch, shard).integers(99, size=9)) for epoch in (0, 1) for shard in (0, 1)
        }
        assert len(drawn) == 4
        one = np.random.default_rng(np.random.SeedSequence([seed, 1, 5]))
        assert make_epoch_generator(seed, 5, 0).random() == one.random()  # as before there were shards


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_process_gets_only_what_it_needs(shuffle: bool) -> None:
    corpus = made_up_corpus(lengths_of({"a": 100, "b": 7}))
    whole = list(loader(corpus, shuffle=shuffle))
    only_inputs = list(loader(corpus, shuffle=shuffle, load_targets=False))
    only_targets = list(loader(corpus, shuffle=shuffle, load_inputs=False))
    for batch, inputs, targets in zip(whole, only_inputs, only_targets, strict=True):
        assert inputs[1] is None and targets[0] is None
        assert_equal([(inputs[0], targets[1])], [batch])
    middle = loader(corpus, shuffle=shuffle, load_inputs=False, load_targets=False)
    assert list(middle) == [(None, None)] * len(whole)
    middle.batch_numbers = range(len(whole) - 2, len(whole))
    assert list(middle) == [(None, None)] * 2


def test_a_process_of_a_middle_stage_keeps_no_sentences() -> None:
    corpus = made_up_corpus(lengths_of({"a": 100, "b": 7}))
    held = weakref.ref(corpus), weakref.ref(corpus.pairs("a").sources)
    middle = [loader(corpus, shuffle=shuffle, load_inputs=False, load_targets=False) for shuffle in (True, False)]
    del corpus
    gc.collect()
    assert [each() for each in held] == [None, None]
    assert all(len(each) > 1 for each in middle)


class EqualPairs:
    """So many pairs of equal sentences, which take no memory."""

    skipped = Skipped()

    def __init__(self, num_pairs: int) -> None:
        shape = (num_pairs,)
        tokens = np.full(64, 2, np.uint16)
        self.sources = self.targets = Sentences(
            tokens, np.broadcast_to(np.int64(0), shape), np.broadcast_to(np.int32(30), shape)
        )
        self.num_tokens, self.longest = 30 * num_pairs, 30

    def __len__(self) -> int:
        return len(self.sources)

    def select(self, rows: NDArray[np.int64] | slice) -> LanguagePairs:
        return LanguagePairs(self.sources.select(rows), self.targets.select(rows))

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        assert len(rows) < 1 << 20


def test_25_billion_pairs_take_no_more_memory_than_a_million(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    peaks = []
    for total in (10**6, 25 * 10**9):
        sizes = [total // 2, total // 4, total // 8, total // 8]
        corpus = ParallelCorpus({f"l{number}": EqualPairs(size) for number, size in enumerate(sizes)}, 64_000)
        each = TranslationLoader(corpus, 262_144, SEED, shuffle=True, temperature=1 / 0.7)
        assert len(each) == 30 * total // 262_144
        tracemalloc.start()
        for epoch, start in ((0, 0), (1, len(each) // 2)):
            each.set_epoch(epoch)
            each.batch_numbers = range(start, len(each))
            (source, _), _ = next(iter(each))
            assert source.shape == (262_144 // 30, 30)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] < 64 << 20
