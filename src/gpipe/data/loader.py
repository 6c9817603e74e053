"""Mini-batches of images for one process of the training."""

import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gpipe.data.augmentation import Transform
from gpipe.data.image_set import BrokenImage, ImageSet
from gpipe.data.randomness import epoch_order, preserve_generators, seed_sample

Batch: TypeAlias = tuple[torch.Tensor | None, torch.Tensor]
_Request: TypeAlias = tuple[int, NDArray[np.int64]]  # epoch, indices


class ImageLoader:
    """Yield the mini-batches of an epoch: (images float32 [n, channels, h, w] or None, labels int64 [n]).

        order of the epoch       | 7 2 5 0 | 3 6 1 4 |     batch_size 2, 2 replicas
        replica 0 gets           | 7   5   | 3   1   |
        replica 1 gets           |   2   0 |   6   4 |

    batch_size: images a replica and step, so a mini-batch has batch_size x num_replicas; together, the replicas get the
    mini-batches of one replica with that larger batch_size. The last mini-batch may be smaller, unless drop_last.
    shuffle: the order is a function of (seed, epoch); False keeps the set's order. The transform's randomness is a
    function of (seed, epoch, index). num_workers changes nothing but the speed; 0 decodes in this process.
    load_images=False is for the processes that hold only the last stage: labels come, and nothing is decoded.

    wait_seconds: how long the current epoch's iteration has waited for data so far.
    start_batch: the first mini-batch of the next iteration, to resume within an epoch; set_epoch puts it back to 0.
    Iterate one at a time: a new iteration ends the one before.

    Raises ValueError for wrong settings, also where a last mini-batch is too small to give every replica an image (they
    would wait for each other); BrokenImage when iterating, whichever process decodes.
    """

    def __init__(
        self,
        image_set: ImageSet,
        batch_size: int,
        transform: Transform,
        seed: int,
        *,
        shuffle: bool,
        num_workers: int,
        load_images: bool = True,
        replica_index: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed {seed} must not be negative")
        if num_workers < 0:
            raise ValueError(f"num_workers {num_workers} must not be negative: 0 decodes in this process")
        if not 0 <= replica_index < num_replicas:
            raise ValueError(f"replica_index {replica_index} must lie in 0 to num_replicas - 1 = {num_replicas - 1}")
        self._labels = image_set.labels
        self._seed = seed
        self._shuffle = shuffle
        self._replica_index, self._num_replicas = replica_index, num_replicas
        self._mini_batch_size = batch_size * num_replicas
        self._num_batches = _count_batches(len(image_set), batch_size, num_replicas, drop_last)
        self.epoch = 0
        self.start_batch = 0
        self.wait_seconds = 0.0
        # The worker processes live from epoch to epoch, so what they are to load travels through this list.
        self._requests: list[_Request] = []
        self._images: Iterable[torch.Tensor | BrokenImage] | None = None
        if load_images:
            samples = _TransformedImages(image_set, transform, seed)
            self._images = _data_loader(samples, self._requests, num_workers, pin_memory, prefetch_factor)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its first mini-batch on."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch} must not be negative")
        self.epoch = epoch
        self.start_batch = 0

    def __len__(self) -> int:
        """Return the number of mini-batches an epoch, whatever start_batch is."""
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield the mini-batches from start_batch on."""
        if not 0 <= self.start_batch <= len(self):
            raise ValueError(f"start_batch {self.start_batch} must lie in 0 to {len(self)}, the number of mini-batches")
        self.wait_seconds = 0.0
        requests = [(self.epoch, indices) for indices in self._parts()]
        self._requests[:] = requests
        images = None if self._images is None else iter(self._images)
        for _, indices in requests:
            started = time.perf_counter()
            batch = None if images is None else next(images)
            self.wait_seconds += time.perf_counter() - started
            if isinstance(batch, BrokenImage):
                raise batch
            yield batch, torch.from_numpy(self._labels[indices])

    def _parts(self) -> list[NDArray[np.int64]]:
        """Return the indices of this replica's part of each mini-batch from start_batch on."""
        num_images = len(self._labels)
        order = epoch_order(self._seed, self.epoch, num_images) if self._shuffle else np.arange(num_images)
        size = self._mini_batch_size
        starts = range(self.start_batch * size, len(self) * size, size)
        return [order[start : start + size][self._replica_index :: self._num_replicas] for start in starts]


class _TransformedImages(Dataset[torch.Tensor | BrokenImage]):
    """Decode and transform the images of one request."""

    def __init__(self, image_set: ImageSet, transform: Transform, seed: int) -> None:
        self.image_set = image_set
        self.transform = transform
        self.seed = seed

    def __getitem__(self, request: _Request) -> torch.Tensor | BrokenImage:
        """Return float32 [n, channels, h, w], or the error: raised in a worker it would come as a nested traceback."""
        epoch, indices = request
        try:
            with preserve_generators():
                return _stacked((self._sample(epoch, int(index)) for index in indices), len(indices))
        except BrokenImage as error:
            return error

    def _sample(self, epoch: int, index: int) -> torch.Tensor:
        image = self.image_set.image(index)
        seed_sample(self.seed, epoch, index)
        return self.transform(image)


def _stacked(samples: Iterable[torch.Tensor], num_samples: int) -> torch.Tensor:
    """Copy samples into one tensor as they come: large ones would each need fresh memory, which costs more than a copy.

    Raises ValueError where their shapes differ.
    """
    batch: torch.Tensor | None = None
    for position, sample in enumerate(samples):
        if batch is None:
            batch = torch.empty(num_samples, *sample.shape, dtype=sample.dtype)
            if get_worker_info() is not None:
                batch.share_memory_()  # it leaves the worker without another copy
        if sample.shape != batch.shape[1:]:
            shapes = f"{tuple(batch.shape[1:])} and {tuple(sample.shape)}"
            raise ValueError(f"the transform made images of the shapes {shapes}: they must all have one shape")
        batch[position] = sample
    assert batch is not None, "every request has an image"
    return batch


def _count_batches(num_images: int, batch_size: int, num_replicas: int, drop_last: bool) -> int:
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size} must be at least 1")
    mini_batch_size = batch_size * num_replicas
    remainder = num_images % mini_batch_size
    if num_images == 0 or (drop_last and num_images < mini_batch_size):
        raise ValueError(f"{num_images} images make no mini-batch of {mini_batch_size}: choose a smaller batch size")
    if 0 < remainder < num_replicas and not drop_last:
        raise ValueError(
            f"the last mini-batch has {remainder} image(s) for {num_replicas} replicas: "
            f"choose another batch_size than {batch_size}, or drop_last"
        )
    return num_images // mini_batch_size if drop_last else math.ceil(num_images / mini_batch_size)


def _data_loader(
    samples: _TransformedImages, requests: list[_Request], num_workers: int, pin_memory: bool, prefetch_factor: int
) -> DataLoader[torch.Tensor | BrokenImage]:
    return DataLoader(
        samples,
        batch_size=None,  # a request is a whole batch
        sampler=requests,
        collate_fn=_unchanged,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        multiprocessing_context=_worker_context() if num_workers else None,
        generator=torch.Generator(),  # otherwise each iteration draws from the global one
    )


def _worker_context() -> BaseContext:
    """Return a way to start workers that is safe although this process has threads.

    Forking a process that has threads (torch's, Gloo's, the autograd engine's) can leave a worker waiting for a lock
    that nobody holds; Python 3.12 warns of it. A fork server has no such threads, and imports torch once for all
    workers, where spawning imports it in each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _unchanged(batch: Any) -> Any:
    return batch
