"""Mini-batches of sentence pairs for one training process."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpipe.data.epoch_loader import EpochPosition
from gpipe.data.randomness import make_epoch_generator
from gpipe.data.text.parallel_corpus import ParallelCorpus
from gpipe.data.text.sentence_walk import SentenceWalk, sampling_probabilities
from gpipe.data.text.tokenizer import END, PADDING

# How much of an epoch is planned at a time. A mini-batch combines sentences of a shard that have similar lengths, so
# each shard must have several mini-batches, however large they are.
SHARD_SENTENCES = 1 << 19
_SHARD_BATCHES = 16

Bounds = list[tuple[int, int]]  # of each mini-batch: its first sentence, and the first of the next one
TranslationBatch = tuple[tuple[Tensor, Tensor] | None, dict[str, Tensor] | None]


class TranslationLoader(EpochPosition):
    """Yields the mini-batches of an epoch: ((source, previous), {"tokens", "language"}), int64.

        source    a1 a2 a3 </s>       previous  </s> b1 b2       tokens  b1 b2 </s>       language  17
                  c1 </s>  .  .                 </s> d1  .               d1 </s>  .                 3      . is PADDING

    source [n, s]; previous and tokens [n, t]; language [n], an index into `languages`. A mini-batch combines sentences
    of similar lengths, so there is little padding. Replica r gets the sentences r, r + R, ... of each mini-batch, as
    wide as the whole mini-batch.

    Training (shuffle=True): an epoch has max(1, tokens of the corpus // batch_size) mini-batches.
    `sampling_probabilities` sets how many pairs it draws of each language; a walk through the language chooses them
    without repeats. An epoch is planned shard by shard, each a function of (seed, epoch, shard) alone. So neither
    memory nor the time to the first mini-batch, of an epoch or after a resume, grows with the corpus:

        walk through the pairs     | epoch 0, shard 0 | shard 1  | shard 2   | epoch 1, shard 0 | ...
        mini-batches               | 0 .. 40          | 41 .. 81 | 82 .. 121 | 0 .. 40

    A shard's pairs are sorted by length and cut into mini-batches, which come in random order. If there are more than
    the shard's share, random ones are left out. If there are fewer, the shard walks on into the pairs of the next one.

    Evaluation (shuffle=False): every pair once, sorted by length, in one shard; only for one replica.

    Args:
        corpus: the pairs.
        batch_size: the most tokens in a mini-batch over all replicas: sentences x the longest on either side, END
            included.
        seed: the seed of the draws.
        shuffle: True for training, False for evaluation.
        temperature: see `sampling_probabilities`.
        load_inputs: False yields None instead of the inputs. A process that loads neither inputs nor targets keeps
            nothing of the corpus and plans nothing.
        load_targets: False yields None instead of the targets.
        replica_index: this process's replica.
        num_replicas: the number of replicas that share each mini-batch.
        shard_sentences: about how many sentences to plan at a time.

    Raises:
        ValueError: a setting is wrong, or batch_size is too small for one longest sentence per replica.
    """

    def __init__(
        self,
        corpus: ParallelCorpus,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        temperature: float = 1.0,
        load_inputs: bool = True,
        load_targets: bool = True,
        replica_index: int = 0,
        num_replicas: int = 1,
        shard_sentences: int = SHARD_SENTENCES,
    ) -> None:
        super().__init__(seed, replica_index, num_replicas)
        if not shuffle and num_replicas > 1:
            raise ValueError("replicas share no mini-batch of an evaluation: give each of them its own batch_numbers")
        self.languages = corpus.languages
        self._batch_size = batch_size
        self._load_inputs, self._load_targets = load_inputs, load_targets
        name = "trainer.batch_size" if shuffle else "trainer.evaluation.batch_size"
        self._check_batch_size(name, int(corpus.longest().max()), len(corpus))
        self._walk: SentenceWalk | None = None
        if shuffle:
            num_pairs, num_tokens = corpus.num_pairs(), corpus.num_tokens()
            self._num_batches = max(1, int(num_tokens.sum()) // batch_size)
            probabilities = sampling_probabilities(num_pairs, temperature)
            mean_tokens = probabilities @ (num_tokens / num_pairs)
            # How many pairs of each language fill an epoch's mini-batches on average.
            draws = np.asarray(self._num_batches * batch_size / mean_tokens * probabilities)
            self._walk = SentenceWalk(num_pairs, draws, seed)
            most = max(1, self._num_batches // _SHARD_BATCHES)
            self._num_shards = min(most, max(1, int(np.ceil(draws.sum() / shard_sentences))))
        else:
            self._num_batches = len(self._plan_evaluation(corpus).bounds)
            self._num_shards = 1
        self._corpus = corpus if load_inputs or load_targets else None

    def __iter__(self) -> Iterator[TranslationBatch]:
        """Yield the mini-batches of batch_numbers."""
        shown = self._batch_numbers()
        self.wait_seconds = 0.0
        if self._corpus is None:
            yield from ((None, None) for _ in shown)
            return
        started = time.perf_counter()
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

    def _check_batch_size(self, name: str, longest: int, num_pairs: int) -> None:
        if self._batch_size < longest * self._num_replicas:
            share = f" x {self._num_replicas} replicas" if self._num_replicas > 1 else ""
            raise ValueError(
                f"{name} is {self._batch_size} tokens, less than the longest sentence of {longest} "
                f"tokens{share}: choose a larger {name}, or a smaller data.max_tokens"
            )
        if num_pairs < self._num_replicas:
            raise ValueError(f"{num_pairs} pairs are too few for {self._num_replicas} replicas: choose fewer")

    def _first_batch(self, shard: int) -> int:
        """Return the first mini-batch of a shard. Shards are equally long: a short one would mix unlike lengths."""
        return shard * self._num_batches // self._num_shards

    def _plan_shard(self, corpus: ParallelCorpus, number: int, first: int, end: int) -> "_Shard":
        """Plan the shard that has the mini-batches first .. end - 1 of the epoch."""
        if self._walk is None:
            return self._plan_evaluation(corpus)
        generator = make_epoch_generator(self._seed, self.epoch, number)
        num_batches = end - first
        start, stop = (self.epoch + batch / self._num_batches for batch in (first, end))
        stretch = 1.0
        while True:
            drawn = _Shard.of(corpus, self._walk.draw(start, stop + (stretch - 1.0) * (stop - start)))
            # Sentences of equal length come in random order.
            shard = drawn.take(generator.permutation(len(drawn.numbers))).sort()
            bounds = [each for each in self._cut(shard) if each[1] - each[0] >= self._num_replicas]
            if len(bounds) >= num_batches:
                chosen = generator.permutation(len(bounds))[:num_batches]
                shard.bounds = [bounds[each] for each in chosen]
                return shard
            stretch *= 1.05 * num_batches / max(1, len(bounds))

    def _plan_evaluation(self, corpus: ParallelCorpus) -> "_Shard":
        shard = _Shard.of(corpus, [np.arange(num) for num in corpus.num_pairs()]).sort()
        shard.bounds = self._cut(shard)
        return shard

    def _cut(self, shard: "_Shard") -> Bounds:
        return cut_by_tokens(np.maximum(shard.sources, shard.targets), self._batch_size)

    def _batch(self, corpus: ParallelCorpus, shard: "_Shard", start: int, end: int) -> TranslationBatch:
        """Return this replica's part of a mini-batch, as wide as the whole mini-batch."""
        own = shard.numbers[start:end][self._replica_index :: self._num_replicas]
        tokens = corpus.pad("targets", own, int(shard.targets[start:end].max()))
        inputs, targets = None, None
        if self._load_inputs:
            source = corpus.pad("sources", own, int(shard.sources[start:end].max()))
            inputs = torch.from_numpy(source), torch.from_numpy(_shift_right(tokens))
        if self._load_targets:
            languages = corpus.language_numbers(own)
            targets = {"tokens": torch.from_numpy(tokens), "language": torch.from_numpy(languages)}
        return inputs, targets


def cut_by_tokens(lengths: NDArray[np.int32], batch_size: int) -> Bounds:
    """Cut sentences into mini-batches that are as long as possible.

        lengths  1 1 2 2 2 3 | 4 4 5 | 7 7 | 9      batch_size 18: sentences x the longest

    Args:
        lengths: tokens of each sentence, ascending, none above batch_size.
        batch_size: the most tokens of a mini-batch.
    """
    bounds, start = [], 0
    while start < len(lengths):
        window = lengths[start : start + batch_size // int(lengths[start])]
        sizes = window * np.arange(1, len(window) + 1)  # of the mini-batch that ends there; ascending
        end = start + int(np.searchsorted(sizes, batch_size, side="right"))
        bounds.append((start, end))
        start = end
    return bounds


@dataclass
class _Shard:
    """The pairs of a part of an epoch: their numbers, their lengths, and the bounds of the mini-batches."""

    numbers: NDArray[np.int64]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    bounds: Bounds

    @classmethod
    def of(cls, corpus: ParallelCorpus, drawn: list[NDArray[np.int64]]) -> "_Shard":
        """Look up the lengths of the drawn pairs of each language."""
        numbers = [first + rows for first, rows in zip(corpus.firsts, drawn, strict=True)]
        sources, targets = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        shown = {language: rows for language, rows in zip(corpus.languages, drawn, strict=True) if len(rows)}
        for language, rows in shown.items():
            corpus.pairs(language).prefetch(rows)
        for language, rows in shown.items():
            pairs = corpus.pairs(language)
            sources.append(pairs.sources.get_lengths(rows))
            targets.append(pairs.targets.get_lengths(rows))
        return cls(np.concatenate(numbers), np.concatenate(sources), np.concatenate(targets), [])

    def take(self, order: NDArray[np.int64]) -> "_Shard":
        """Return the pairs in another order."""
        return _Shard(self.numbers[order], self.sources[order], self.targets[order], [])

    def sort(self) -> "_Shard":
        """Sort the pairs stably by the length of the longer side, of the source, and of the target."""
        sources, targets = self.sources.astype(np.int64), self.targets.astype(np.int64)
        keys = np.maximum(sources, targets) << 42 | sources << 21 | targets
        return self.take(np.argsort(keys, kind="stable"))


def _shift_right(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token before each token, the decoder's input: END, then the tokens without the last END."""
    previous = np.concatenate([np.full_like(tokens[:, :1], END), tokens[:, :-1]], axis=1)
    previous[tokens == PADDING] = PADDING
    return previous
