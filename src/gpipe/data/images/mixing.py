"""Mixup and CutMix: each image of a mini-batch becomes a mixture of two, and so does its label."""

import torch

import gpipe._compat.torchvision  # noqa: F401  (must come before timm, which imports torchvision)
from gpipe.data.randomness import preserve_generators, seed_mini_batch

from timm.data.mixup import Mixup  # isort: skip


class Mixing:
    """Mixes the images of a mini-batch in pairs, the first with the last, with timm's Mixup.

        images    a           b           c           d
        mixup     w a + v d   w b + v c   w c + v b   w d + v a      with v = 1 - w
        CutMix    a, and within a box d; ...                         v is the box's share of the area
        targets   w on the image's class, v on the other's

    w and the box are drawn once per mini-batch, as a function of (seed, epoch, number of the mini-batch). A process
    without images draws the same as one that has them. Each replica mixes within its own part of a mini-batch, and all
    replicas draw the same. With both methods on, each mini-batch uses one of them, with equal probability.

    Targets are not smoothed: the loss does that.

    Args:
        mixup: both parameters of the beta distribution of w; 0 turns mixup off.
        cutmix: the same for CutMix.
        num_classes: the number of classes of the targets.
        image_size: pixels per side.

    Sources: Zhang et al., 2018 (mixup); Yun et al., 2019 (CutMix).
    """

    def __init__(self, *, mixup: float, cutmix: float, num_classes: int, image_size: int) -> None:
        self._mixup = Mixup(  # type: ignore[no-untyped-call]  # timm has no annotations
            mixup, cutmix, label_smoothing=0.0, num_classes=num_classes
        )
        self._image_size = image_size

    def mix_images(self, images: torch.Tensor, seed: int, epoch: int, number: int) -> None:
        """Mix images, [n, channels, size, size] with an even n, in place."""
        if images.shape[2:] != (self._image_size, self._image_size):
            raise ValueError(f"images of {tuple(images.shape[2:])} pixels must be squares of {self._image_size}")
        self._mix(images, torch.zeros(len(images), dtype=torch.int64), seed, epoch, number)

    def mix_labels(self, labels: torch.Tensor, seed: int, epoch: int, number: int) -> torch.Tensor:
        """Return the targets of `mix_images`: int64 [n] -> float32 [n, classes]."""
        # A box depends on the size of the images, not on their pixels; the meta device has none.
        images = torch.empty(len(labels), 1, self._image_size, self._image_size, device="meta")
        return self._mix(images, labels, seed, epoch, number)

    def _mix(self, images: torch.Tensor, labels: torch.Tensor, seed: int, epoch: int, number: int) -> torch.Tensor:
        with preserve_generators():  # timm draws from numpy's
            seed_mini_batch(seed, epoch, number)
            targets: torch.Tensor = self._mixup(images, labels)[1]
        return targets
