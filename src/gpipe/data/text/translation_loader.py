"""Mini-batches of pairs of sentences for one process of the training."""

import time
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpipe.data.epoch_position import EpochPosition
from gpipe.data.randomness import epoch_generator
from gpipe.data.text.parallel_corpus import ParallelCorpus
from gpipe.data.text.sentence_walk import SentenceWalk
from gpipe.data.text.special_tokens import END, PADDING
from gpipe.data.text.temperature import sampling_probabilities
from gpipe.data.text.token_batches import Bounds, cut_by_tokens, fill_last

# How much of an epoch is planned at a time. Sentences of a shard that are alike in length make a mini-batch, so that a
# few mini-batches must come from each shard, however large they are.
SHARD_SENTENCES = 1 << 19
_SHARD_BATCHES = 16

TranslationBatch = tuple[tuple[Tensor, Tensor] | None, dict[str, Tensor] | None]


class TranslationLoader(EpochPosition):
    """Yield the mini-batches of an epoch: ((source, previous), {"tokens", "language"}), int64.

        source    a1 a2 a3 </s>       previous  </s> b1 b2       tokens  b1 b2 </s>       language  17
                  c1 </s>  .  .                 </s> d1  .               d1 </s>  .                 3      . is PADDING

    source [n, s]; previous and tokens [n, t]; language [n], an index into `languages`.

    batch_size: tokens of a mini-batch, all replicas together: sentences x the longest of either side, END included, is
    at most that. Sentences of like lengths come together, so that there is little padding. Replica r gets the
    sentences r, r + R, ... of each mini-batch, padded as the whole one.

    shuffle=True, for training: an epoch has max(1, tokens of the corpus // batch_size) mini-batches. Its pairs are
    drawn by language with `sampling_probabilities`, walking through each language without repeats; all is a function
    of (seed, epoch). An epoch is planned shard by shard, each a function of (seed, epoch, shard) alone, so that neither
    memory nor the time to the first mini-batch, of an epoch or after a resume, grows with the corpus:

        walk through the pairs     | epoch 0, shard 0 | shard 1  | shard 2   | epoch 1, shard 0 | ...
        mini-batches               | 0 .. 40          | 41 .. 81 | 82 .. 121 | 0 .. 40

    A shard's pairs are sorted by length, cut, and its mini-batches come in random order. Where the cut makes more than
    the shard's share, some that are chosen at random are left out; where it makes fewer, the shard walks on into what
    the next one begins with.

    shuffle=False, for evaluation: every pair once, sorted by length, in one shard.

    only: the languages to draw from or to show; None is all. load_inputs, load_targets: what this process needs; None
    stands in the place of the others, and a process that needs neither keeps nothing of the corpus and plans nothing.

    Raises ValueError for wrong settings, also where batch_size does not hold the longest sentence for every replica.
    """

    def __init__(
        self,
        corpus: ParallelCorpus,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        temperature: float = 1.0,
        only: Collection[str] | None = None,
        load_inputs: bool = True,
        load_targets: bool = True,
        replica_index: int = 0,
        num_replicas: int = 1,
        shard_sentences: int = SHARD_SENTENCES,
    ) -> None:
        super().__init__(seed, replica_index, num_replicas)
        self.languages = corpus.languages
        for language in only or ():
            corpus.pairs(language)
        shown = np.array([only is None or language in only for language in self.languages])
        if not shown.any():
            raise ValueError("only is empty: name a language to show, or None for all")
        self._batch_size = batch_size
        self._load_inputs, self._load_targets = load_inputs, load_targets
        self._check_batch_size(int(corpus.longest()[shown].max()), int(corpus.num_pairs()[shown].sum()))
        self._num_pairs = corpus.num_pairs() * shown
        self._walk: SentenceWalk | None = None
        if shuffle:
            self._num_batches = max(1, int(corpus.num_tokens()[shown].sum()) // batch_size)
            draws = self._mean_draws(corpus.num_tokens(), temperature)
            self._walk = SentenceWalk(self._num_pairs, draws, seed)
            most = max(1, self._num_batches // _SHARD_BATCHES)
            self._num_shards = min(most, max(1, int(np.ceil(draws.sum() / shard_sentences))))
        else:
            self._num_batches = len(self._plan_evaluation(corpus).bounds)
            self._num_shards = 1
        self._corpus = corpus if load_inputs or load_targets else None

    def __iter__(self) -> Iterator[TranslationBatch]:
        """Yield the mini-batches from start_batch on."""
        self._check_start()
        self.wait_seconds = 0.0
        if self._corpus is None:
            yield from ((None, None) for _ in range(self.start_batch, len(self), self.stride))
            return
        started = time.perf_counter()
        shown = range(self.start_batch, len(self), self.stride)
        for number in range(self._num_shards):
            first, end = self._first_batch(number), self._first_batch(number + 1)
            in_shard = shown[bisect_left(shown, first) : bisect_left(shown, end)]
            if not in_shard:
                continue
            shard = self._plan_shard(self._corpus, number, first, end)
            for batch_number in in_shard:
                batch = self._batch(self._corpus, shard, *shard.bounds[batch_number - first])
                self.wait_seconds += time.perf_counter() - started
                yield batch
                started = time.perf_counter()

    def _check_batch_size(self, longest: int, num_pairs: int) -> None:
        if self._batch_size < longest * self._num_replicas:
            share = f" x {self._num_replicas} replicas" if self._num_replicas > 1 else ""
            raise ValueError(
                f"batch_size {self._batch_size} tokens is less than the longest sentence of {longest} tokens{share}: "
                "choose a larger batch_size, or a smaller data.max_tokens"
            )
        if num_pairs < self._num_replicas:
            raise ValueError(f"{num_pairs} pairs do not suffice for {self._num_replicas} replicas: choose fewer")

    def _mean_draws(self, num_tokens: NDArray[np.int64], temperature: float) -> NDArray[np.float64]:
        """Return how many pairs of each language make, on average, the tokens of the mini-batches of an epoch."""
        drawn = np.flatnonzero(self._num_pairs)
        probabilities = np.zeros(len(self._num_pairs))
        probabilities[drawn] = sampling_probabilities(self._num_pairs[drawn], temperature)
        mean_tokens = probabilities[drawn] @ (num_tokens[drawn] / self._num_pairs[drawn])
        return np.asarray(self._num_batches * self._batch_size / mean_tokens * probabilities)

    def _first_batch(self, shard: int) -> int:
        """Return where a shard begins. They are as even as they can be: a short one would mix unlike lengths."""
        return shard * self._num_batches // self._num_shards

    def _plan_shard(self, corpus: ParallelCorpus, number: int, first: int, end: int) -> "_Shard":
        """Plan a shard of the epoch, which has the mini-batches from `first` to before `end`."""
        if self._walk is None:
            return self._plan_evaluation(corpus)
        generator = epoch_generator(self._seed, self.epoch, number)
        num_batches = end - first
        start, stop = (self.epoch + batch / self._num_batches for batch in (first, end))
        stretch = 1.0
        while True:
            drawn = _Shard.of(corpus, self._walk.draw(start, stop + (stretch - 1.0) * (stop - start)))
            # Sentences of one length come in random order.
            shard = drawn.take(generator.permutation(np.arange(len(drawn.numbers)))).by_length()
            bounds = [each for each in self._cut(shard) if each[1] - each[0] >= self._num_replicas]
            if len(bounds) >= num_batches:
                chosen = generator.permutation(len(bounds))[:num_batches]
                shard.bounds = [bounds[each] for each in chosen]
                return shard
            stretch *= 1.05 * num_batches / max(1, len(bounds))

    def _plan_evaluation(self, corpus: ParallelCorpus) -> "_Shard":
        shard = _Shard.of(corpus, [np.arange(num) for num in self._num_pairs]).by_length()
        shard.bounds = fill_last(self._cut(shard), self._num_replicas)
        return shard

    def _cut(self, shard: "_Shard") -> Bounds:
        return cut_by_tokens(np.maximum(shard.sources, shard.targets), self._batch_size)

    def _batch(self, corpus: ParallelCorpus, shard: "_Shard", start: int, end: int) -> TranslationBatch:
        """Return this replica's part of a mini-batch, as wide as the whole of it."""
        own = shard.numbers[start:end][self._replica_index :: self._num_replicas]
        tokens = corpus.padded_targets(own, int(shard.targets[start:end].max()))
        inputs, targets = None, None
        if self._load_inputs:
            source = corpus.padded_sources(own, int(shard.sources[start:end].max()))
            inputs = torch.from_numpy(source), torch.from_numpy(_previous(tokens))
        if self._load_targets:
            languages = corpus.language_numbers(own)
            targets = {"tokens": torch.from_numpy(tokens), "language": torch.from_numpy(languages)}
        return inputs, targets


@dataclass
class _Shard:
    """Hold the pairs of a part of an epoch: their numbers and lengths, and which runs of them are mini-batches."""

    numbers: NDArray[np.int64]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    bounds: Bounds

    @classmethod
    def of(cls, corpus: ParallelCorpus, drawn: list[NDArray[np.int64]]) -> "_Shard":
        """Look up the lengths of some pairs of each language."""
        numbers = [first + rows for first, rows in zip(corpus.firsts, drawn, strict=True)]
        sources, targets = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        shown = {language: rows for language, rows in zip(corpus.languages, drawn, strict=True) if len(rows)}
        for language, rows in shown.items():
            corpus.pairs(language).prefetch(rows)
        for language, rows in shown.items():
            pairs = corpus.pairs(language)
            sources.append(pairs.sources.lengths_of(rows))
            targets.append(pairs.targets.lengths_of(rows))
        return cls(np.concatenate(numbers), np.concatenate(sources), np.concatenate(targets), [])

    def take(self, order: NDArray[np.int64]) -> "_Shard":
        """Return the pairs in another order."""
        return _Shard(self.numbers[order], self.sources[order], self.targets[order], [])

    def by_length(self) -> "_Shard":
        """Sort the pairs by the longer side, then by the source, then by the target; equal ones stay in their order."""
        sources, targets = self.sources.astype(np.int64), self.targets.astype(np.int64)
        keys = np.maximum(sources, targets) << 42 | sources << 21 | targets
        return self.take(np.argsort(keys, kind="stable"))


def _previous(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what the decoder has read before it tells each token: END, and then the tokens but the last END."""
    previous = np.concatenate([np.full_like(tokens[:, :1], END), tokens[:, :-1]], axis=1)
    previous[tokens == PADDING] = PADDING
    return previous
