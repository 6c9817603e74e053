"""Mini-batches of images for one training process."""

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, TypeAlias, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gpipe._compat.fork_server import exit_with_fork_server
from gpipe.data.dataset_loader import keep_batch
from gpipe.data.epoch_loader import EpochLoader, EpochOptions
from gpipe.data.images.augmentation import Transform
from gpipe.data.images.image_set import BrokenImage, ImageSet
from gpipe.data.randomness import preserve_generators, seed_sample

if TYPE_CHECKING:
    from gpipe.data.images.mixing import Mixing  # timm takes seconds to load, and most workers never need it

Batch: TypeAlias = tuple[torch.Tensor | None, torch.Tensor]
_Request: TypeAlias = tuple[int, int, NDArray[np.int64]]  # epoch, number of the mini-batch, indices
_Answer: TypeAlias = tuple[torch.Tensor, dict[int, str]] | BrokenImage  # the images, and why some indices are broken


class ImageLoader(EpochLoader[Batch]):
    """Yields the mini-batches of an epoch: (images [n, channels, h, w] or None, labels int64 [n]).

    A new iteration ends the previous one. If images are mixed, or have several labels each, float32 targets [n,
    classes] replace the labels.

    The next good image of the same class, in the set's order, replaces a broken image. It is augmented as the broken
    one would be. The replacement depends only on the files, so it is the same in every process and epoch and for every
    K, and the label stays right on processes that decode nothing. A process reports each broken image that it decodes
    once, on stderr.

    Args:
        image_set, batch_size, seed, options: as in EpochLoader.
        transform: applied to each decoded image; its randomness is a function of (seed, epoch, index).
        num_workers: processes that decode; 0 decodes in this process. Only the speed depends on it.
        load_images: False yields labels only, for processes that hold only the last stage.
        pin_memory: put images into page-locked memory.
        prefetch_factor: mini-batches that each worker prepares ahead.
        max_broken_images: the number of files that may be broken.
        mixing: mixes the images of this replica's part of each mini-batch; None leaves them as they are.

    Raises:
        ValueError: a setting is out of range, or mixing would meet an odd number of images.
        BrokenImage: raised by an iteration that meets more broken images than allowed.

    Attributes:
        broken_images: the broken images found so far: index -> why it is broken.
    """

    def __init__(
        self,
        image_set: ImageSet,
        batch_size: int,
        transform: Transform,
        seed: int,
        *,
        num_workers: int,
        load_images: bool = True,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        max_broken_images: int = 0,
        mixing: "Mixing | None" = None,
        **options: Unpack[EpochOptions],
    ) -> None:
        super().__init__(len(image_set), batch_size, seed, noun="image", **options)
        if mixing is not None and (batch_size % 2 or not options.get("drop_last")):
            raise ValueError(f"batch_size {batch_size} must be even, with drop_last=True, to mix images in pairs")
        self._mixing = mixing
        self._labels = image_set.labels
        self._max_broken_images = max_broken_images
        self.broken_images: dict[int, str] = {}
        # The worker processes outlive an epoch: this list carries their requests.
        self._requests: list[_Request] = []
        self._open: Callable[[], Iterable[_Answer | None]] = partial(repeat, None)
        if load_images:
            self._open = partial(
                _QuietLoader,
                _TransformedImages(image_set, transform, seed, max_broken_images, mixing),
                batch_size=None,  # a request is a whole batch
                sampler=self._requests,
                collate_fn=keep_batch,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor if num_workers else None,
                persistent_workers=num_workers > 0,
                pin_memory=pin_memory,
                multiprocessing_context=_make_context() if num_workers else None,
                worker_init_fn=exit_with_fork_server,
                generator=torch.Generator(),  # otherwise each iteration draws from the global one
            )
        self._images: Iterable[_Answer | None] = self._open()
        # Kept here: an abandoned iteration must not keep the worker processes alive.
        self._answers: Iterator[_Answer | None] = iter(())

    def _read(self) -> Iterator[Batch]:
        self._requests[:] = [(self.epoch, number, indices) for number, indices in self._parts()]
        self._answers = iter(self._images)
        for epoch, number, indices in tuple(self._requests):
            images = self._accept(next(self._answers), indices)
            targets = torch.from_numpy(self._labels[indices])
            targets = targets.float() if targets.dtype == torch.bool else targets  # several labels each
            if self._mixing is not None:
                targets = self._mixing.mix_labels(targets, self._seed, epoch, number)
            yield images, targets

    def close(self) -> None:
        """End the worker processes; the next iteration starts new ones.

        Garbage collection would take five seconds per worker: it deletes a worker's queue before it stops the worker.
        """
        self._answers = iter(())
        self._images = self._open()

    def _accept(self, answer: _Answer | None, indices: NDArray[np.int64]) -> torch.Tensor | None:
        """Return the images of the answer to a request of `indices`; warn about each newly found broken image.

        Answers come in the order of the requests, so the same mini-batch ends the run with any number of workers.

        Raises:
            BrokenImage: there is one too many.
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
                raise BrokenImage(_explain_limit(broken[index], limit))
            print(f"warning: {broken[index]} (number {number} of at most {limit})", file=sys.stderr, flush=True)
        return images


@dataclass(eq=False)
class _TransformedImages(Dataset[_Answer]):
    """Decode, transform and mix the images of one request."""

    image_set: ImageSet
    transform: Transform
    seed: int
    max_broken_images: int
    mixing: "Mixing | None"

    def __getitem__(self, request: _Request) -> _Answer:
        """Return images [n, channels, h, w], or the error: raising it in a worker would give a nested traceback."""
        epoch, number, indices = request
        broken: dict[int, str] = {}
        try:
            with preserve_generators():
                images = _stack((self._sample(epoch, int(index), broken) for index in indices), len(indices))
        except BrokenImage as error:
            return error
        if self.mixing is not None:
            self.mixing.mix_images(images, self.seed, epoch, number)
        return images, broken

    def _sample(self, epoch: int, index: int, broken: dict[int, str]) -> torch.Tensor:
        image = self._decode(index, broken)
        seed_sample(self.seed, epoch, index)
        return self.transform(image)

    def _decode(self, index: int, broken: dict[int, str]) -> Image.Image:
        """Decode an image or, if it is broken, the next good one of its class; add broken ones to `broken`."""
        for candidate in self._list_candidates(index):
            try:
                return self.image_set.image(candidate)
            except BrokenImage as error:
                broken[candidate] = str(error)
                if len(broken) > self.max_broken_images:
                    raise BrokenImage(_explain_limit(str(error), self.max_broken_images)) from error
        raise BrokenImage(f"{broken[index]}, because no image of its class is left to replace it")

    def _list_candidates(self, index: int) -> Iterator[int]:
        """Yield an image's index, then the others of its class, beginning with the next one."""
        yield index
        same = self.image_set.labels == self.image_set.labels[index]
        of_class = np.flatnonzero(same if same.ndim == 1 else same.all(axis=1))
        following = np.searchsorted(of_class, index) + 1
        yield from (int(other) for other in np.roll(of_class, -following)[:-1])


def _explain_limit(message: str, limit: int) -> str:
    return f"{message}, or raise data.max_broken_images={limit}, the most that may be broken"


def _stack(samples: Iterable[torch.Tensor], num_samples: int) -> torch.Tensor:
    """Copy samples into one tensor as they come, which is faster than collecting them; refuse unequal shapes."""
    batch: torch.Tensor | None = None
    for position, sample in enumerate(samples):
        if batch is None:
            batch = torch.empty(num_samples, *sample.shape, dtype=sample.dtype)
            if get_worker_info() is not None:
                batch.share_memory_()  # reaches the main process without another copy
        if sample.shape != batch.shape[1:]:
            shapes = f"{tuple(batch.shape[1:])} and {tuple(sample.shape)}"
            raise ValueError(f"the transform made images of the shapes {shapes}: they must all have the same shape")
        batch[position] = sample
    assert batch is not None, "every request has an image"
    return batch


class _QuietLoader(DataLoader[_Answer]):
    """Does not warn of more workers than cores: the default suits more cores, and does no harm on a laptop with two."""

    def check_worker_number_rationality(self) -> None:
        """Accept any number."""


def _make_context() -> BaseContext:
    """Return a fork server, which is safe to use from a process with threads.

    Forking a process that has threads (torch's, Gloo's, the autograd engine's) can leave a worker waiting for a lock
    that nobody holds; Python 3.12 warns about it. A fork server has no such threads. It imports torch once for all
    workers; spawned workers would each import it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
