"""What happens to a decoded image on its way into the model.

A transform is a callable PIL image -> float32 tensor [channels, size, size] with pixels in [-1, 1]. It draws from the
global generators of torch, numpy and random, as the transforms of torchvision and timm do; `ImageLoader` seeds
them for each sample and puts them back. All steps but the last work on PIL images: for small images that is quicker
than on tensors.
"""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance

import gpipe._torchvision  # noqa: F401  (before torchvision)

# isort: split
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

Transform = Callable[[Image.Image], torch.Tensor]


def training_transform(
    image_size: int,
    *,
    channels: int = 3,
    crop_scale: tuple[float, float] = (0.1, 1.0),
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3),
    color_jitter: float = 0.4,
    flip: bool = True,
) -> Transform:
    """Return random-area crop, horizontal flip and colour jitter; the defaults are the public TPU code's recipe.

    image_size: pixels a side. crop_scale: the crop's share of the area. crop_aspect: its width over height.
    color_jitter: brightness, contrast and saturation are multiplied by 1 - color_jitter to 1 + color_jitter; 0 is off.
    Raises ValueError for settings out of range.

    Deviation: the public TPU code's jitter ranges differ by property and include the hue; here one range, as in timm.
    """
    if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
        raise ValueError(f"crop_scale {crop_scale} must be (smallest, largest) within 0 < smallest <= largest <= 1")
    if not 0 < crop_aspect[0] <= crop_aspect[1]:
        raise ValueError(f"crop_aspect {crop_aspect} must be (smallest, largest) with 0 < smallest <= largest")
    if not 0 <= color_jitter <= 1:
        raise ValueError(f"color_jitter {color_jitter} must lie in [0, 1]")
    _check_size(image_size)
    steps: list[Callable[..., object]] = [v2.RandomResizedCrop(image_size, scale=crop_scale, ratio=crop_aspect)]
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    if color_jitter:
        steps.append(ColorJitter(color_jitter))
    transform: Transform = v2.Compose([*steps, ToPixels(channels)])
    return transform


def evaluation_transform(image_size: int, *, channels: int = 3, center_crop: float = 0.875) -> Transform:
    """Return the central crop, resized to image_size pixels a side.

    center_crop: the crop's share of the height and of the width, as in the public TPU code (which does not keep the
    aspect either); 1 takes the whole image. Raises ValueError for settings out of range.
    """
    if not 0 < center_crop <= 1:
        raise ValueError(f"center_crop {center_crop} must lie in (0, 1]: it is a share of the height and of the width")
    _check_size(image_size)
    transform: Transform = v2.Compose([CentralCrop(image_size, center_crop), ToPixels(channels)])
    return transform


class ColorJitter:
    """Scale brightness, contrast and saturation of a PIL image, in random order, each by 1 - strength to 1 + strength.

    The same as torchvision's, which takes half as long again on a small grey image, the quickstart's largest expense.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the changed image."""
        factors = (1 + self.strength * (2 * torch.rand(3) - 1)).tolist()
        enhancements = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for index in torch.randperm(3).tolist():
            if enhancements[index] is not ImageEnhance.Color or image.mode != "L":  # grey has no saturation
                image = enhancements[index](image).enhance(factors[index])
        return image


class CentralCrop:
    """Cut the central share of a PIL image and resize it to image_size pixels a side."""

    def __init__(self, image_size: int, share: float) -> None:
        self.image_size = image_size
        self.share = share

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the cut and resized image."""
        size = [max(1, round(self.share * side)) for side in (image.height, image.width)]
        cut: Image.Image = functional.center_crop(image, size)
        resized: Image.Image = functional.resize(cut, [self.image_size, self.image_size])
        return resized


class ToPixels:
    """Turn a PIL image into float32 [channels, h, w] in [-1, 1]; channels=3 repeats a grey image."""

    def __init__(self, channels: int) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels {channels} must be 1 (grey) or 3 (colour)")
        self.channels = channels

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the pixels of `image`."""
        if self.channels == 1 and image.mode != "L":
            image = image.convert("L")
        pixels = torch.from_numpy(np.array(image)).to(torch.float32).div_(127.5).sub_(1.0)
        if pixels.ndim == 2:
            return pixels.expand(self.channels, -1, -1)
        return pixels.permute(2, 0, 1)


def _check_size(image_size: int) -> None:
    if image_size < 1:
        raise ValueError(f"image_size {image_size} must be at least 1 pixel")
