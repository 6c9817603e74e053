"""What happens to a decoded image on its way into the model.

A transform is a callable PIL image -> float32 tensor [channels, size, size] with pixels in [-1, 1]. It draws from the
global generators of torch, numpy and random, as the transforms of torchvision and timm do; `ImageLoader` seeds
them for each sample and puts them back. Only the crop and the policies work on a PIL image: torch resizes bytes in half
of PIL's time, and the rest is a few passes over floats, in place. The number of threads changes no bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

# isort: split
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

Transform = Callable[[Image.Image], torch.Tensor]

POLICIES: dict[str, Callable[[], Callable[[Image.Image], Image.Image]] | None] = {
    "none": None,
    "autoaugment": partial(v2.AutoAugment, v2.AutoAugmentPolicy.IMAGENET),
    "randaugment": partial(v2.RandAugment, num_ops=2, magnitude=9),
}


def training_transform(
    image_size: int,
    *,
    channels: int = 3,
    crop_scale: tuple[float, float] | None = (0.1, 1.0),
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3),
    color_jitter: float = 0.4,
    flip: bool = True,
    policy: str = "none",
    cutout: float = 0.0,
) -> Transform:
    """Return random-area crop, flip, policy, colour jitter and cutout; the defaults are the public TPU code's recipe.

    image_size: pixels a side. crop_scale: the crop's share of the area; None takes the whole image, as the paper's
    fine-tuning does. crop_aspect: its width over height. policy: "none", "autoaugment" (the ImageNet policy) or
    "randaugment" (2 operations of magnitude 9). color_jitter: brightness, contrast and saturation are multiplied by
    1 - color_jitter to 1 + color_jitter; 0 is off. cutout: the side of a grey square as a share of the image's; 0 is
    off. Raises ValueError for settings out of range.

    Deviation: the colour jitter has one range for brightness, contrast and saturation, as in timm, where the public TPU
    code's ranges differ by property and include the hue.

    Deviation: the cutout square lies within the image, where DeVries and Taylor's may hang over the border, and is then
    smaller. The paper does not say where its squares lie.
    """
    _check_size(image_size, channels)
    _check_crop(crop_scale, crop_aspect)
    _check_changes(image_size, color_jitter, policy, cutout)
    steps: list[Callable[[Any], Any]] = [RandomCrop(crop_scale, crop_aspect)] if crop_scale else []
    steps.append(Resize(image_size, channels))
    if flip:
        steps.append(random_flip)
    if make_policy := POLICIES[policy]:
        steps += [v2.ToPILImage(), make_policy(), v2.PILToTensor()]
    steps.append(to_pixels)
    if color_jitter:
        steps.append(ColorJitter(color_jitter))
    if cutout:
        steps.append(v2.RandomErasing(1.0, (cutout**2, cutout**2), (1.0, 1.0)))
    return Steps(channels, steps)


def evaluation_transform(image_size: int, *, channels: int = 3, center_crop: float = 0.875) -> Transform:
    """Return the central crop, resized to image_size pixels a side.

    center_crop: the crop's share of the height and of the width, as in the public TPU code (which does not keep the
    aspect either); 1 takes the whole image. Raises ValueError for settings out of range.
    """
    if not 0 < center_crop <= 1:
        raise ValueError(f"center_crop {center_crop} must lie in (0, 1]: it is a share of the height and of the width")
    _check_size(image_size, channels)
    return Steps(channels, [CentralCrop(center_crop), Resize(image_size, channels), to_pixels])


class Steps:
    """Take the steps of a transform in order: PIL image -> float32 [channels, h, w], a grey image repeated."""

    def __init__(self, channels: int, steps: list[Callable[[Any], Any]]) -> None:
        self.channels = channels
        self.steps = steps

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the pixels of `image`."""
        value: Any = image
        for step in self.steps:
            value = step(value)
        pixels: torch.Tensor = value
        return pixels.expand(self.channels, -1, -1)


class RandomCrop:
    """Cut a random rectangle out of a PIL image: scale is its share of the area, aspect its width over height."""

    def __init__(self, scale: tuple[float, float], aspect: tuple[float, float]) -> None:
        self.rectangle = v2.RandomResizedCrop(1, scale=scale, ratio=aspect)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the rectangle."""
        found = self.rectangle.make_params([image])
        left, top = found["left"], found["top"]
        return image.crop((left, top, left + found["width"], top + found["height"]))


class CentralCrop:
    """Cut the central share of the height and of the width out of a PIL image."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the cut image."""
        size = [max(1, round(self.share * side)) for side in (image.height, image.width)]
        cut: Image.Image = functional.center_crop(image, size)
        return cut


class Resize:
    """Turn a PIL image into bytes of image_size pixels a side: uint8 [1 or 3, size, size]; channels=1 makes it grey."""

    def __init__(self, image_size: int, channels: int) -> None:
        self.image_size = image_size
        self.channels = channels

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the bytes of the resized image, to the last bit but one those of PIL's antialiased bilinear filter."""
        if self.channels == 1 and image.mode != "L":
            image = image.convert("L")
        levels = torch.from_numpy(np.array(image))
        levels = levels[None] if levels.ndim == 2 else levels.permute(2, 0, 1)
        size = (self.image_size, self.image_size)
        return F.interpolate(levels[None], size, mode="bilinear", antialias=True)[0].contiguous()


class ColorJitter:
    """Scale brightness, contrast and saturation of pixels, each by 1 - strength to 1 + strength.

    Brightness is the distance from black, contrast that from the image's mean grey, saturation that from the pixel's
    own grey. Clipped once, at the end, as in the public TPU code, the three are one affine map, in whatever order.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Change pixels, [1 or 3, h, w] in [-1, 1], in place, and return them."""
        brightness, contrast, saturation = (1 + self.strength * (2 * torch.rand(3) - 1)).tolist()
        grey = pixels[0].clone()
        if len(pixels) == 3:
            grey.mul_(0.299).add_(0.587 * pixels[1]).add_(0.114 * pixels[2])
        mean = grey.mean(dim=1).mean().item()  # in two sums, neither of which torch splits between threads
        slope, shift = brightness * contrast, brightness - 1 + brightness * (1 - contrast) * mean
        grey.mul_(slope * (1 - saturation)).add_(shift)
        return pixels.mul_(slope * saturation).add_(grey).clamp_(-1, 1)


def random_flip(levels: torch.Tensor) -> torch.Tensor:
    """Mirror every second image, [c, h, w], left to right; torchvision's takes three times as long on small ones."""
    return levels.flip(2) if torch.rand(()).item() < 0.5 else levels


def to_pixels(levels: torch.Tensor) -> torch.Tensor:
    """Map bytes to float32 in [-1, 1]; any shape."""
    return levels.to(torch.float32).div_(127.5).sub_(1.0)


def _check_crop(scale: tuple[float, float] | None, aspect: tuple[float, float]) -> None:
    if scale is not None and not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"crop_scale {scale} must be (smallest, largest) within 0 < smallest <= largest <= 1, or None")
    if not 0 < aspect[0] <= aspect[1]:
        raise ValueError(f"crop_aspect {aspect} must be (smallest, largest) with 0 < smallest <= largest")


def _check_changes(image_size: int, color_jitter: float, policy: str, cutout: float) -> None:
    if not 0 <= color_jitter <= 1:
        raise ValueError(f"color_jitter {color_jitter} must lie in [0, 1]")
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} must be one of {', '.join(POLICIES)}")
    if cutout and not 1 <= round(cutout * image_size) < image_size:
        raise ValueError(f"cutout {cutout} of {image_size} pixels must be 0 or a side of 1 to {image_size - 1} pixels")


def _check_size(image_size: int, channels: int) -> None:
    if image_size < 1:
        raise ValueError(f"image_size {image_size} must be at least 1 pixel")
    if channels not in (1, 3):
        raise ValueError(f"channels {channels} must be 1 (grey) or 3 (colour)")
