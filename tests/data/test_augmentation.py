"""Transforms: sizes, value range, and each setting's effect."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe.data import evaluation_transform, training_transform
from gpipe.data.randomness import preserve_generators, seed_sample

GREY = Image.fromarray(np.arange(28 * 28, dtype=np.uint16).reshape(28, 28).astype(np.uint8))
COLOUR = Image.merge("RGB", [GREY, GREY.rotate(90), GREY.rotate(180)])
WHOLE_IMAGE = {"crop_scale": (1.0, 1.0), "crop_aspect": (1.0, 1.0)}


def draw(transform: Callable[[Image.Image], torch.Tensor], image: Image.Image, index: int = 0) -> torch.Tensor:
    with preserve_generators():
        seed_sample(0, 0, index)
        return transform(image)


@pytest.mark.parametrize("image", [GREY, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("make", [training_transform, evaluation_transform])
def test_every_image_becomes_the_asked_size(make, channels: int, image: Image.Image) -> None:
    pixels = draw(make(64, channels=channels), image)
    assert pixels.shape == (channels, 64, 64) and pixels.dtype == torch.float32
    assert -1 <= pixels.min() < pixels.max() <= 1


def test_pixels_span_minus_one_to_one() -> None:
    black_and_white = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8))
    pixels = evaluation_transform(2, channels=1, center_crop=1.0)(black_and_white)
    assert pixels.tolist() == [[[-1.0, 1.0], [1.0, -1.0]]]


def test_grey_is_repeated_over_three_channels() -> None:
    pixels = evaluation_transform(28, channels=3)(GREY)
    assert torch.equal(pixels[0], pixels[1]) and torch.equal(pixels[0], pixels[2])


def test_evaluation_takes_the_central_share() -> None:
    image = Image.new("L", (64, 32), 0)
    image.paste(255, (4, 2, 60, 30))
    assert (evaluation_transform(16, channels=1, center_crop=0.875)(image) == 1).all()
    assert (evaluation_transform(16, channels=1, center_crop=1.0)(image) != 1).any()


def test_training_without_randomness_is_the_whole_image() -> None:
    transform = training_transform(28, channels=3, color_jitter=0.0, flip=False, **WHOLE_IMAGE)
    assert torch.equal(draw(transform, COLOUR), evaluation_transform(28, center_crop=1.0)(COLOUR))


def test_flip_mirrors_about_half_of_the_images() -> None:
    transform = training_transform(28, channels=1, color_jitter=0.0, **WHOLE_IMAGE)
    straight = evaluation_transform(28, channels=1, center_crop=1.0)(GREY)
    outcomes = [draw(transform, GREY, index) for index in range(200)]
    num_mirrored = sum(torch.equal(outcome, straight.flip(2)) for outcome in outcomes)
    assert sum(torch.equal(outcome, straight) for outcome in outcomes) == 200 - num_mirrored
    assert 70 < num_mirrored < 130


def test_color_jitter_scales_the_brightness_within_its_range() -> None:
    transform = training_transform(4, channels=1, color_jitter=0.4, flip=False, **WHOLE_IMAGE)
    levels = [(draw(transform, Image.new("L", (4, 4), 100), index)[0, 0, 0].item() + 1) * 127.5 for index in range(200)]
    assert 59 <= min(levels) < 70 and 130 < max(levels) <= 141


def test_crop_covers_the_asked_share_of_the_area() -> None:
    """A horizontal ramp, cropped to a quarter of the area at aspect 1, spans half of its values."""
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (200, 1)))
    transform = training_transform(
        100, channels=1, crop_scale=(0.25, 0.25), crop_aspect=(1.0, 1.0), color_jitter=0.0, flip=False
    )
    corners = []
    for index in range(20):
        levels = (draw(transform, ramp, index) + 1) * 127.5
        assert (levels.max() - levels.min()).item() == pytest.approx(99, abs=0.01)
        corners.append(levels.min().item())
    assert max(corners) - min(corners) > 50


@pytest.mark.parametrize(
    ("make", "settings", "complaint"),
    [
        (training_transform, {"crop_scale": (0.0, 1.0)}, "crop_scale"),
        (training_transform, {"crop_scale": (0.5, 0.4)}, "crop_scale"),
        (training_transform, {"crop_aspect": (2.0, 1.0)}, "crop_aspect"),
        (training_transform, {"color_jitter": 1.5}, "color_jitter 1.5"),
        (training_transform, {"channels": 4}, "channels 4"),
        (training_transform, {"image_size": 0}, "image_size 0"),
        (evaluation_transform, {"center_crop": 0.0}, "center_crop 0.0"),
        (evaluation_transform, {"channels": 2}, "channels 2"),
        (evaluation_transform, {"image_size": -1}, "image_size -1"),
    ],
)
def test_settings_out_of_range_are_refused(make, settings: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make(**{"image_size": 8, **settings})
