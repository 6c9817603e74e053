"""Mini-batches of pairs of sentences for one process of the training."""

import time
from collections.abc import Collection, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpipe.data.epoch_position import EpochPosition
from gpipe.data.parallel_corpus import ParallelCorpus
from gpipe.data.randomness import epoch_generator
from gpipe.data.sentence_walk import SentenceWalk
from gpipe.data.special_tokens import END, PADDING
from gpipe.data.temperature import sampling_probabilities
from gpipe.data.token_batches import Bounds, cut_by_tokens, fill_last

TranslationBatch = tuple[tuple[Tensor, Tensor], dict[str, Tensor]]


class TranslationLoader(EpochPosition):
    """Yield the mini-batches of an epoch: ((source, previous), {"tokens", "language"}), int64, on every stage.

        source    a1 a2 a3 </s>       previous  </s> b1 b2       tokens  b1 b2 </s>       language  17
                  c1 </s>  .  .                 </s> d1  .               d1 </s>  .                 3      . is PADDING

    source [n, s]; previous and tokens [n, t]; language [n], an index into `languages`.

    batch_size: tokens of a mini-batch, all replicas together: sentences x the longest of either side, END included, is
    at most that. Sentences of like lengths come together, so that there is little padding. Replica r gets the
    sentences r, r + R, ... of each mini-batch, padded as the whole one.

    shuffle=True, for training: an epoch has max(1, tokens of the corpus // batch_size) mini-batches. Its pairs are
    drawn by language with `sampling_probabilities`, walking through each language without repeats; all is a function
    of (seed, epoch). shuffle=False, for evaluation: every pair once, sorted by length.

    only: the languages to draw from or to show; None is all. Raises ValueError for wrong settings, also where
    batch_size does not hold the longest sentence for every replica.
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
        replica_index: int = 0,
        num_replicas: int = 1,
    ) -> None:
        super().__init__(seed, replica_index, num_replicas)
        self.languages = corpus.languages
        self._blocks = corpus.blocks
        shown = np.array([only is None or language in only for language in self.languages])
        for language in only or ():
            corpus.pairs(language)
        if not shown.any():
            raise ValueError("only is empty: name a language to show, or None for all")
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._firsts = np.concatenate([[0], np.cumsum(corpus.num_pairs())])
        self._block_firsts = np.cumsum([0, *map(len, self._blocks)])
        self._sources, self._targets = (
            np.concatenate([side.lengths for side in sides])
            for sides in ([block.sources for block in self._blocks], [block.targets for block in self._blocks])
        )
        self._longest = np.maximum(self._sources, self._targets)
        self._shown = np.repeat(shown, corpus.num_pairs())
        self._check_batch_size()
        if shuffle:
            tokens = self._longest[self._shown].sum(dtype=np.int64)
            self._num_batches = max(1, int(tokens) // batch_size)
            self._walk = self._plan_walk(corpus.num_pairs() * shown, temperature, seed)
        else:
            self._num_batches = len(self._evaluation_plan()[1])

    def __iter__(self) -> Iterator[TranslationBatch]:
        """Yield the mini-batches from start_batch on."""
        self._check_start()
        self.wait_seconds = 0.0
        started = time.perf_counter()
        order, bounds = self._training_plan() if self._shuffle else self._evaluation_plan()
        for start, end in bounds[self.start_batch :: self.stride]:
            batch = self._batch(order[start:end])
            self.wait_seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def _check_batch_size(self) -> None:
        longest = int(self._longest[self._shown].max())
        if self._batch_size < longest * self._num_replicas:
            share = f" x {self._num_replicas} replicas" if self._num_replicas > 1 else ""
            raise ValueError(
                f"batch_size {self._batch_size} tokens is less than the longest sentence of {longest} tokens{share}: "
                "choose a larger batch_size, or a smaller data.max_tokens"
            )
        if np.count_nonzero(self._shown) < self._num_replicas:
            raise ValueError(
                f"{np.count_nonzero(self._shown)} pairs do not suffice for {self._num_replicas} replicas: choose fewer"
            )

    def _plan_walk(self, num_pairs: NDArray[np.int64], temperature: float, seed: int) -> SentenceWalk:
        """Return the walk whose epochs draw, on average, the tokens of the mini-batches of an epoch."""
        drawn = np.flatnonzero(num_pairs)
        probabilities = np.zeros(len(num_pairs))
        probabilities[drawn] = sampling_probabilities(num_pairs[drawn], temperature)
        mean_tokens = np.add.reduceat(self._longest, self._firsts[:-1], dtype=np.int64) / np.diff(self._firsts)
        num_sentences = self._num_batches * self._batch_size / (probabilities @ mean_tokens)
        return SentenceWalk(num_pairs, num_sentences * probabilities, seed)

    def _training_plan(self) -> tuple[NDArray[np.int64], Bounds]:
        """Return the pairs of the epoch in an order in which each mini-batch is a run, and the runs."""
        generator = epoch_generator(self._seed, self.epoch)
        stretch = 1.0
        while True:
            drawn = self._walk.draw(self.epoch, stretch)
            numbers = np.concatenate([first + rows for first, rows in zip(self._firsts, drawn, strict=False)])
            order = self._by_length(generator.permutation(numbers))  # sentences of one length come in random order
            bounds = [each for each in self._cut(order) if each[1] - each[0] >= self._num_replicas]
            if len(bounds) >= self._num_batches:
                chosen = generator.permutation(len(bounds))[: self._num_batches]
                return order, [bounds[number] for number in chosen]
            stretch *= 1.05 * self._num_batches / max(1, len(bounds))

    def _evaluation_plan(self) -> tuple[NDArray[np.int64], Bounds]:
        order = self._by_length(np.flatnonzero(self._shown))
        return order, fill_last(self._cut(order), self._num_replicas)

    def _by_length(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort pairs by the longer side, then by the source, then by the target; equal ones stay in their order."""
        keys = self._longest[numbers].astype(np.int64) << 42 | self._sources[numbers].astype(np.int64) << 21
        return numbers[np.argsort(keys | self._targets[numbers], kind="stable")]

    def _cut(self, order: NDArray[np.int64]) -> Bounds:
        return cut_by_tokens(self._longest[order], self._batch_size)

    def _batch(self, numbers: NDArray[np.int64]) -> TranslationBatch:
        """Return this replica's part of a mini-batch, as wide as the whole of it."""
        widths = int(self._sources[numbers].max()), int(self._targets[numbers].max())
        own = numbers[self._replica_index :: self._num_replicas]
        source, tokens = (np.empty((len(own), width), np.int64) for width in widths)
        blocks = np.searchsorted(self._block_firsts, own, side="right") - 1
        for block in np.unique(blocks):
            here = blocks == block
            rows = own[here] - self._block_firsts[block]
            source[here] = self._blocks[block].sources.padded(rows, widths[0])
            tokens[here] = self._blocks[block].targets.padded(rows, widths[1])
        languages = np.searchsorted(self._firsts, own, side="right") - 1
        inputs = torch.from_numpy(source), torch.from_numpy(_previous(tokens))
        return inputs, {"tokens": torch.from_numpy(tokens), "language": torch.from_numpy(languages)}


def _previous(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what the decoder has read before it tells each token: END, and then the tokens but the last END."""
    previous = np.concatenate([np.full_like(tokens[:, :1], END), tokens[:, :-1]], axis=1)
    previous[tokens == PADDING] = PADDING
    return previous
