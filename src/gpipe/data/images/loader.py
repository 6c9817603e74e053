"""Mini-batches of images for one process of the training."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gpipe.data.epoch_loader import EpochLoader
from gpipe.data.images.augmentation import Transform
from gpipe.data.images.image_set import BrokenImage, ImageSet
from gpipe.data.randomness import preserve_generators, seed_sample

Batch: TypeAlias = tuple[torch.Tensor | None, torch.Tensor]
_Request: TypeAlias = tuple[int, NDArray[np.int64]]  # epoch, indices
_Answer: TypeAlias = tuple[torch.Tensor, dict[int, str]] | BrokenImage  # images; why those of some indices are broken


class ImageLoader(EpochLoader):
    """Yield the mini-batches of an epoch: (images float32 [n, channels, h, w] or None, labels int64 [n]).

    The arguments beside those of EpochLoader: the transform's randomness is a function of (seed, epoch, index).
    num_workers changes nothing but the speed; 0 decodes in this process. load_images=False is for the processes that
    hold only the last stage: labels come, and nothing is decoded. Iterate one at a time: a new iteration ends the one
    before.

    max_broken_images: so many different files may be broken. In the place of one stands the next image of the same
    class that is whole, in the set's order, augmented as the broken one would be. So it is a function of the files
    alone, the same for every process, worker, K and epoch, and the label stays right for the processes that decode
    nothing. Each is named once on stderr by the process that meets it. An image in memory is never broken.
    broken_images: why those that this loader met so far are broken, by their index.

    Raises ValueError for wrong settings; BrokenImage when iterating, whichever process decodes, where there are more.
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
        max_broken_images: int = 0,
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
        if max_broken_images < 0:
            raise ValueError(f"max_broken_images {max_broken_images} must not be negative: 0 lets none pass")
        self._labels = image_set.labels
        self._max_broken_images = max_broken_images
        self.broken_images: dict[int, str] = {}
        # The worker processes live from epoch to epoch, so what they are to load travels through this list.
        self._requests: list[_Request] = []
        self._images: Iterable[_Answer] | None = None
        if load_images:
            samples = _TransformedImages(image_set, transform, seed, max_broken_images)
            self._open = partial(_data_loader, samples, self._requests, num_workers, pin_memory, prefetch_factor)
            self._images = self._open()
        # Not within the iteration: an iteration that was left does not keep the worker processes alive then.
        self._answers: Iterator[_Answer] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        """Yield the mini-batches from start_batch on."""
        requests = [(self.epoch, indices) for indices in self._parts()]
        self.wait_seconds = 0.0
        self.num_replaced = 0
        self._requests[:] = requests
        if self._images is not None:
            self._answers = iter(self._images)
        for _, indices in requests:
            started = time.perf_counter()
            answer = None if self._images is None else next(self._answers)
            self.wait_seconds += time.perf_counter() - started
            yield self._accepted(answer, indices), torch.from_numpy(self._labels[indices])

    def close(self) -> None:
        """End the worker processes; another iteration starts new ones.

        Left to Python's collector, they would take five seconds each: it takes their queues before it tells them.
        """
        if self._images is not None:
            self._answers = iter(())
            self._images = self._open()

    def _accepted(self, answer: _Answer | None, indices: NDArray[np.int64]) -> torch.Tensor | None:
        """Return the images of the answer to a request of `indices`, after a word on each that is newly found broken.

        Raises BrokenImage where it is one too many. Answers come in the order of the requests, so that with any number
        of workers the same mini-batch ends the run.
        """
        if answer is None:
            return None
        if isinstance(answer, BrokenImage):
            raise answer
        images, broken = answer
        self.num_replaced += sum(int(index) in broken for index in indices)
        for index in sorted(broken.keys() - self.broken_images.keys()):
            self.broken_images[index] = broken[index]
            number, limit = len(self.broken_images), self._max_broken_images
            if number > limit:
                raise BrokenImage(_too_many(broken[index], limit))
            print(f"warning: {broken[index]} (number {number} of at most {limit})", file=sys.stderr, flush=True)
        return images


class _TransformedImages(Dataset[_Answer]):
    """Decode and transform the images of one request."""

    def __init__(self, image_set: ImageSet, transform: Transform, seed: int, max_broken_images: int) -> None:
        self.image_set = image_set
        self.transform = transform
        self.seed = seed
        self.max_broken_images = max_broken_images

    def __getitem__(self, request: _Request) -> _Answer:
        """Return float32 [n, channels, h, w], or the error: raised in a worker it would come as a nested traceback."""
        epoch, indices = request
        broken: dict[int, str] = {}
        try:
            with preserve_generators():
                return _stacked((self._sample(epoch, int(index), broken) for index in indices), len(indices)), broken
        except BrokenImage as error:
            return error

    def _sample(self, epoch: int, index: int, broken: dict[int, str]) -> torch.Tensor:
        image = self._whole(index, broken)
        seed_sample(self.seed, epoch, index)
        return self.transform(image)

    def _whole(self, index: int, broken: dict[int, str]) -> Image.Image:
        """Decode an image or, where it is broken, the next one of its class that is not; note all that are."""
        for candidate in self._stand_ins(index):
            try:
                return self.image_set.image(candidate)
            except BrokenImage as error:
                if self.max_broken_images == 0:
                    raise
                broken[candidate] = str(error)
                if len(broken) > self.max_broken_images:
                    raise BrokenImage(_too_many(str(error), self.max_broken_images)) from error
        raise BrokenImage(f"{broken[index]}, because no image of its class is left to stand in for it")

    def _stand_ins(self, index: int) -> Iterator[int]:
        """Yield an image and, should that not do, the others of its class, beginning with the next one."""
        yield index
        of_class = np.flatnonzero(self.image_set.labels == self.image_set.labels[index])
        following = np.searchsorted(of_class, index) + 1
        yield from (int(other) for other in np.roll(of_class, -following)[:-1])


def _too_many(message: str, limit: int) -> str:
    return f"{message}, or raise data.max_broken_images={limit}, the most that may be broken"


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
) -> DataLoader[_Answer]:
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

    By itself a worker looks for its parent every five seconds, and not while it decodes, hangs or is stopped. And it
    keeps the fork server alive, which ends when nobody has a certain pipe open any more.
    """
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # the stub lacks it
    # Has no effect where the system is not Linux.
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]  # the stub lacks it


def _unchanged(batch: Any) -> Any:
    return batch
