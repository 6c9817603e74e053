"""Mini-batches of sentence pairs for one training process."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

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
Shard = NDArray[np.int64]  # pairs of a part of an epoch, [3, pairs]: their numbers, and the lengths of both sides
TranslationBatch = tuple[tuple[Tensor, Tensor] | None, dict[str, Tensor] | None]


class TranslationLoader(EpochPosition[TranslationBatch]):
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
            self._num_batches = len(self._plan_evaluation(corpus)[1])
            self._num_shards = 1
        self._corpus = corpus if load_inputs or load_targets else None

    def _read(self) -> Iterator[TranslationBatch]:
        shown = self._batch_numbers()
        if self._corpus is None:
            yield from ((None, None) for _ in shown)
            return
        for number in range(self._num_shards):
            first, end = self._first_batch(number), self._first_batch(number + 1)
            in_shard = shown[bisect_left(shown, first) : bisect_left(shown, end)]
            if not in_shard:
                continue
            shard, bounds = self._plan_shard(self._corpus, number, first, end)
            for batch_number in in_shard:
                yield self._batch(self._corpus, shard[:, slice(*bounds[batch_number - first])])

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

    def _plan_shard(self, corpus: ParallelCorpus, number: int, first: int, end: int) -> tuple[Shard, Bounds]:
        """Plan the shard that has the mini-batches first .. end - 1 of the epoch."""
        if self._walk is None:
            return self._plan_evaluation(corpus)
        generator = make_epoch_generator(self._seed, self.epoch, number)
        num_batches = end - first
        start, stop = (self.epoch + batch / self._num_batches for batch in (first, end))
        stretch = 1.0
        while True:
            drawn = _look_up(corpus, self._walk.draw(start, stop + (stretch - 1.0) * (stop - start)))
            # Sentences of equal length come in random order.
            shard = _sort(drawn[:, generator.permutation(drawn.shape[1])])
            bounds = [each for each in self._cut(shard) if each[1] - each[0] >= self._num_replicas]
            if len(bounds) >= num_batches:
                return shard, [bounds[each] for each in generator.permutation(len(bounds))[:num_batches]]
            stretch *= 1.05 * num_batches / max(1, len(bounds))

    def _plan_evaluation(self, corpus: ParallelCorpus) -> tuple[Shard, Bounds]:
        shard = _sort(_look_up(corpus, [np.arange(num) for num in corpus.num_pairs()]))
        return shard, self._cut(shard)

    def _cut(self, shard: Shard) -> Bounds:
        return cut_by_tokens(shard[1:].max(axis=0), self._batch_size)

    def _batch(self, corpus: ParallelCorpus, pairs: Shard) -> TranslationBatch:
        """Return this replica's part of a mini-batch of these pairs, as wide as the whole mini-batch."""
        own = pairs[0, self._replica_index :: self._num_replicas]
        _, source_width, target_width = pairs.max(axis=1)
        tokens = corpus.pad("targets", own, target_width)
        inputs, targets = None, None
        if self._load_inputs:
            source = corpus.pad("sources", own, source_width)
            inputs = torch.from_numpy(source), torch.from_numpy(_shift_right(tokens))
        if self._load_targets:
            languages = corpus.language_numbers(own)
            targets = {"tokens": torch.from_numpy(tokens), "language": torch.from_numpy(languages)}
        return inputs, targets


def cut_by_tokens(lengths: NDArray[np.integer], batch_size: int) -> Bounds:
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


def _look_up(corpus: ParallelCorpus, drawn: Sequence[NDArray[np.int64]]) -> Shard:
    """Look up the lengths of the drawn pairs of each language."""
    languages = zip(corpus.languages, corpus.firsts, drawn, strict=True)
    shown = [(corpus.pairs(language), first, rows) for language, first, rows in languages if len(rows)]
    for pairs, _, rows in shown:
        pairs.prefetch(rows)
    parts = [
        np.stack([first + rows, pairs.sources.get_lengths(rows), pairs.targets.get_lengths(rows)])
        for pairs, first, rows in shown
    ]
    return np.concatenate([np.empty((3, 0), np.int64), *parts], axis=1)


def _sort(shard: Shard) -> Shard:
    """Sort the pairs stably by the length of the longer side, of the source, and of the target."""
    _, sources, targets = shard
    keys = np.maximum(sources, targets) << 42 | sources << 21 | targets
    return shard[:, np.argsort(keys, kind="stable")]


def _shift_right(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token before each token, the decoder's input: END, then the tokens without the last END."""
    previous = np.concatenate([np.full_like(tokens[:, :1], END), tokens[:, :-1]], axis=1)
    previous[tokens == PADDING] = PADDING
    return previous
