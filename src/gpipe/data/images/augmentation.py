"""Transforms from a decoded image to the model's input.

A transform maps a PIL image to a float32 tensor [channels, size, size] with pixels in [-1, 1], or normalised by a
model's mean and standard deviation; or to uint8, from which `BytesToPixels` computes the same. Like the transforms of
torchvision and timm, it draws from the global generators of torch, numpy and random; `ImageLoader` seeds them for each
sample and restores them. Only the crop and the policies work on a PIL image: torch resizes bytes in half PIL's time,
and the rest is a few passes over floats, in place. The number of threads changes no bit of the result.
"""

from collections.abc import Callable, Iterable, Sequence
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
    random_erasing: float = 0.0,
    interpolation: str = "bilinear",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    as_bytes: bool = False,
) -> Transform:
    """Return a transform: random-area crop, flip, policy, colour jitter, cutout and erasing.

    The defaults are the public TPU code's.

    Args:
        image_size: pixels per side.
        channels: 1 (grey) or 3.
        crop_scale: the crop's share of the area; None takes the whole image, as the paper's fine-tuning does.
        crop_aspect: the crop's width over its height.
        color_jitter: brightness, contrast and saturation are multiplied by 1 - color_jitter to 1 + color_jitter.
        flip: mirror half of the images.
        policy: "none", "autoaugment" (the ImageNet policy) or "randaugment" (2 operations of magnitude 9).
        cutout: the side of a grey square as a share of the image's side.
        random_erasing: the probability that normal noise replaces a rectangle of 2 % to a third of the area, as in
            timm's own training (Zhong et al., 2020). Its pixels may lie outside [-1, 1].
        interpolation: how to resize, "bilinear" or "bicubic".
        mean: the mean of each channel of pixels in [0, 1], which becomes 0. None means 0.5.
        std: the standard deviation of each channel of pixels in [0, 1], which becomes 1. None means 0.5.
        as_bytes: leave the last step to `BytesToPixels`, unless there is jitter, cutout or erasing.

    Raises:
        ValueError: cutout would cut out nothing, or everything.

    Deviation: the colour jitter has one range for brightness, contrast and saturation, as in timm; the public TPU code
    has a range for each of them and one for the hue.

    Deviation: the cutout square always lies within the image; DeVries and Taylor's may be cut off by the border. The
    paper does not say where its squares lie.
    """
    if cutout and not 1 <= round(cutout * image_size) < image_size:
        raise ValueError(f"cutout {cutout} of {image_size} pixels must be 0 or a side of 1 to {image_size - 1} pixels")
    steps: list[Callable[[Any], Any]] = []
    if crop_scale:
        steps.append(partial(_crop, v2.RandomResizedCrop(1, scale=crop_scale, ratio=crop_aspect)))
    steps.append(partial(_resize, image_size, channels, interpolation))
    if flip:
        steps.append(_flip)
    if make_policy := POLICIES[policy]:
        steps += [v2.ToPILImage(), make_policy(), v2.PILToTensor()]
    if as_bytes and not (color_jitter or cutout or random_erasing):
        return partial(_apply, steps, channels)
    steps.append(_to_pixels)
    if color_jitter:
        steps.append(partial(_jitter, color_jitter))
    if cutout:
        steps.append(v2.RandomErasing(1.0, (cutout**2, cutout**2), (1.0, 1.0)))
    steps += _make_normalization(mean, std)
    if random_erasing:
        from timm.data.random_erasing import RandomErasing  # takes seconds to load

        erase = RandomErasing(random_erasing, mode="pixel", device="cpu")  # type: ignore[no-untyped-call]  # timm's
        steps.append(erase)
    return partial(_apply, steps, channels)


def evaluation_transform(
    image_size: int,
    *,
    channels: int = 3,
    center_crop: float = 0.875,
    keep_aspect: bool = False,
    interpolation: str = "bilinear",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    as_bytes: bool = False,
) -> Transform:
    """Return a transform: the central crop, resized to image_size pixels per side.

    Args:
        image_size: pixels per side.
        channels: 1 (grey) or 3.
        center_crop: the crop's share of the height and of the width; 1 takes the whole image, and more adds a black
            border, as timm does. The aspect changes, as in the public TPU code.
        keep_aspect: take a square instead, whose side is this share of the shorter one, as timm does.
        interpolation: as in `training_transform`.
        mean: as in `training_transform`.
        std: as in `training_transform`.
        as_bytes: leave the last step to `BytesToPixels`.
    """
    steps: list[Callable[[Any], Any]] = [
        partial(_crop_centre, center_crop, keep_aspect),
        partial(_resize, image_size, channels, interpolation),
    ]
    return partial(_apply, steps if as_bytes else [*steps, _to_pixels, *_make_normalization(mean, std)], channels)


class BytesToPixels:
    """The last step of a transform, for many images at once, on any device: a GPU then gets a quarter of the bytes.

    The result is bitwise that of a transform, with the same mean and std, that includes this step.
    """

    def __init__(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        self._moments = mean, std
        self._steps: dict[torch.device, list[Callable[[Any], Any]]] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Turn uint8 images [n, channels, h, w] into float32; leave other images as they are."""
        if images.dtype is not torch.uint8:
            return images
        if images.device not in self._steps:
            self._steps[images.device] = _make_normalization(*self._moments, device=images.device)
        pixels = _to_pixels(images)
        for step in self._steps[images.device]:
            pixels = step(pixels)
        return pixels


def _apply(steps: Iterable[Callable[[Any], Any]], channels: int, image: Image.Image) -> torch.Tensor:
    """Apply the steps of a transform in order: PIL image -> float32 [channels, h, w]; a grey image is repeated."""
    value: Any = image
    for step in steps:
        value = step(value)
    pixels: torch.Tensor = value
    return pixels.expand(channels, -1, -1)


def _crop(rectangle: v2.RandomResizedCrop, image: Image.Image) -> Image.Image:
    """Cut a random rectangle out of a PIL image."""
    found = rectangle.make_params([image])
    left, top = found["left"], found["top"]
    return image.crop((left, top, left + found["width"], top + found["height"]))


def _crop_centre(share: float, keep_aspect: bool, image: Image.Image) -> Image.Image:
    """Crop a PIL image to a central share of its height and width, or to a square of that share of the shorter side."""
    sides = (min(image.size),) * 2 if keep_aspect else (image.height, image.width)
    size = [max(1, round(share * side)) for side in sides]
    cut: Image.Image = functional.center_crop(image, size)
    return cut


def _resize(image_size: int, channels: int, interpolation: str, image: Image.Image) -> torch.Tensor:
    """Resize a PIL image to uint8 [1 or 3, image_size, image_size]; channels=1 makes it grey.

    A byte differs by at most 1 from PIL's antialiased filter of that name.
    """
    if channels == 1 and image.mode != "L":
        image = image.convert("L")
    levels = torch.from_numpy(np.array(image))
    levels = levels[None] if levels.ndim == 2 else levels.permute(2, 0, 1)
    size = (image_size, image_size)
    return F.interpolate(levels[None], size, mode=interpolation, antialias=True)[0].contiguous()


def _flip(levels: torch.Tensor) -> torch.Tensor:
    """Mirror an image [c, h, w] with probability 1/2; a small one takes a third of torchvision's time."""
    return levels.flip(2) if torch.rand(()).item() < 0.5 else levels


def _to_pixels(levels: torch.Tensor) -> torch.Tensor:
    """Map bytes to float32 in [-1, 1]; any shape."""
    return levels.to(torch.float32).div_(127.5).sub_(1.0)


def _make_normalization(
    mean: Sequence[float] | None, std: Sequence[float] | None, device: torch.device | str = "cpu"
) -> list[Callable[[Any], Any]]:
    """Return the step that normalises pixels in [-1, 1] by mean and std; [] if both are 0.5."""
    means, deviations = mean or [0.5], std or [0.5]
    if {*means, *deviations} == {0.5}:
        return []
    shift = torch.tensor([2 * value - 1 for value in means])[:, None, None].to(device)
    scale = torch.tensor([2 * value for value in deviations])[:, None, None].to(device)
    return [partial(_normalize, shift, scale)]


def _normalize(shift: torch.Tensor, scale: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Map pixels, [..., 1 or 3, h, w], channel by channel; a grey image gets as many channels as there are means."""
    return (pixels - shift) / scale


def _jitter(strength: float, pixels: torch.Tensor) -> torch.Tensor:
    """Scale brightness, contrast and saturation of pixels, [1 or 3, h, w] in [-1, 1], each by 1 +- strength, in place.

    Brightness scales the distance from black, contrast the distance from the image's mean grey, saturation the distance
    from the pixel's own grey. As in the public TPU code, only the end result is clipped. So the three are one affine
    map, in any order.
    """
    brightness, contrast, saturation = (1 + strength * (2 * torch.rand(3) - 1)).tolist()
    grey = pixels[0].clone()
    if len(pixels) == 3:
        grey.mul_(0.299).add_(0.587 * pixels[1]).add_(0.114 * pixels[2])
    mean = grey.mean(dim=1).mean().item()  # two sums: torch splits neither between threads
    slope, shift = brightness * contrast, brightness - 1 + brightness * (1 - contrast) * mean
    grey.mul_(slope * (1 - saturation)).add_(shift)
    return pixels.mul_(slope * saturation).add_(grey).clamp_(-1, 1)
