"""Mini-batches of images for one process of the training."""

import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gpipe.data.augmentation import Transform
from gpipe.data.epoch_loader import EpochLoader
from gpipe.data.image_set import BrokenImage, ImageSet
from gpipe.data.randomness import preserve_generators, seed_sample

Batch: TypeAlias = tuple[torch.Tensor | None, torch.Tensor]
_Request: TypeAlias = tuple[int, NDArray[np.int64]]  # epoch, indices


class ImageLoader(EpochLoader):
    """Yield the mini-batches of an epoch: (images float32 [n, channels, h, w] or None, labels int64 [n]).

    The arguments beside those of EpochLoader: the transform's randomness is a function of (seed, epoch, index).
    num_workers changes nothing but the speed; 0 decodes in this process. load_images=False is for the processes that
    hold only the last stage: labels come, and nothing is decoded. Iterate one at a time: a new iteration ends the one
    before.

    Raises ValueError for wrong settings; BrokenImage when iterating, whichever process decodes.
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
        super().__init__(
            len(image_set),
            batch_size,
            seed,
            shuffle=shuffle,
            replica_index=replica_index,
            num_replicas=num_replicas,
            drop_last=drop_last,
            noun="image",
        )
        if num_workers < 0:
            raise ValueError(f"num_workers {num_workers} must not be negative: 0 decodes in this process")
        self._labels = image_set.labels
        # The worker processes live from epoch to epoch, so what they are to load travels through this list.
        self._requests: list[_Request] = []
        self._images: Iterable[torch.Tensor | BrokenImage] | None = None
        if load_images:
            samples = _TransformedImages(image_set, transform, seed)
            self._images = _data_loader(samples, self._requests, num_workers, pin_memory, prefetch_factor)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the mini-batches from start_batch on."""
        requests = [(self.epoch, indices) for indices in self._parts()]
        self.wait_seconds = 0.0
        self._requests[:] = requests
        images = None if self._images is None else iter(self._images)
        for _, indices in requests:
            started = time.perf_counter()
            batch = None if images is None else next(images)
            self.wait_seconds += time.perf_counter() - started
            if isinstance(batch, BrokenImage):
                raise batch
            yield batch, torch.from_numpy(self._labels[indices])


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
        worker_init_fn=_end_with_parent,
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


def _end_with_parent(worker: int) -> None:  # noqa: ARG001 - torch passes it
    """Let the system kill this worker when its fork server ends, which does as soon as the training process is gone.

    By itself a worker looks for its parent every five seconds, and not while it decodes, hangs or is stopped.
    """
    # Has no effect where the system is not Linux.
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]  # the stub lacks it


def _unchanged(batch: Any) -> Any:
    return batch
