"""Transforms: sizes, value range, and each setting's effect."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from gpipe.data import BytesToPixels, evaluation_transform, training_transform
from gpipe.data.randomness import preserve_generators, seed_sample

# isort: split
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import v2

GREY = Image.fromarray(np.arange(28 * 28, dtype=np.uint16).reshape(28, 28).astype(np.uint8))
COLOUR = Image.merge("RGB", [GREY, GREY.rotate(90), GREY.rotate(180)])
WHITE = Image.new("RGB", (40, 40), "white")
WHOLE_IMAGE = {"crop_scale": (1.0, 1.0), "crop_aspect": (1.0, 1.0)}
NOTHING_RANDOM = {"crop_scale": None, "color_jitter": 0.0, "flip": False}
POLICIES = {"autoaugment": v2.AutoAugment, "randaugment": v2.RandAugment}


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


@pytest.mark.parametrize("image_size", [9, 28, 50])
def test_resizing_is_that_of_pil_up_to_one_level(image_size: int) -> None:
    levels = (evaluation_transform(image_size, center_crop=1.0)(COLOUR) + 1) * 127.5
    expected = np.asarray(COLOUR.resize((image_size, image_size), Image.Resampling.BILINEAR), np.float32)
    assert np.abs(levels.permute(1, 2, 0).numpy() - expected).max() < 1.01


def test_without_a_crop_the_whole_image_is_resized_whatever_its_aspect() -> None:
    image = COLOUR.resize((41, 23))
    expected = evaluation_transform(32, center_crop=1.0)(image)
    assert torch.equal(draw(training_transform(32, **NOTHING_RANDOM), image), expected)


def test_color_jitter_is_that_of_pil_where_nothing_is_clipped() -> None:
    """PIL rounds after each of three steps, and rounds the mean grey, each by up to half a level."""
    dull = COLOUR.point([96 + level // 4 for level in range(256)] * 3)
    for index in range(20):
        with preserve_generators():
            seed_sample(0, 0, index)
            brightness, contrast, saturation = (1 + 0.2 * (2 * torch.rand(3) - 1)).tolist()
        expected = ImageEnhance.Brightness(dull).enhance(brightness)
        expected = ImageEnhance.Color(ImageEnhance.Contrast(expected).enhance(contrast)).enhance(saturation)
        found = draw(training_transform(28, **{**NOTHING_RANDOM, "color_jitter": 0.2}), dull, index)
        levels = ((found + 1) * 127.5).permute(1, 2, 0).numpy()
        assert np.abs(levels - np.asarray(expected, np.float32)).max() < 3


def test_the_number_of_threads_changes_no_bit() -> None:
    image = COLOUR.resize((300, 200))
    before = torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(draw(training_transform(331, policy="randaugment", cutout=0.2), image))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_torchvisions_on_the_resized_image(policy: str, mode: str) -> None:
    image = COLOUR.convert(mode)
    transform = training_transform(28, channels=len(image.getbands()), policy=policy, **NOTHING_RANDOM)
    num_changed = 0
    for index in range(100):
        with preserve_generators():
            seed_sample(0, 0, index)
            expected = POLICIES[policy]()(image)
        found = draw(transform, image, index)
        assert torch.equal(found, v2.functional.pil_to_tensor(expected) / 127.5 - 1)
        num_changed += not np.array_equal(np.asarray(expected), np.asarray(image))
    assert num_changed > 50


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_draws_from_the_sample_alone(policy: str) -> None:
    transform = training_transform(28, policy=policy, cutout=0.3)
    samples = [draw(transform, COLOUR, index) for index in range(10)]
    assert len({sample.numpy().tobytes() for sample in samples}) == 10
    with preserve_generators():
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        for index in reversed(range(10)):
            assert torch.equal(draw(transform, COLOUR, index), samples[index])


@pytest.mark.parametrize("image", [WHITE, WHITE.convert("L")], ids=["colour", "grey"])
@pytest.mark.parametrize(("share", "side"), [(0.5, 20), (0.26, 10), (0.025, 1), (0.975, 39)])
def test_cutout_is_a_square_of_mid_grey_after_everything_else(share: float, side: int, image: Image.Image) -> None:
    transform = training_transform(40, crop_scale=None, color_jitter=0.4, cutout=share)
    corners = set()
    for index in range(20):
        pixels = draw(transform, image, index)
        hole = pixels == 0
        rows, columns = hole[0].any(dim=1), hole[0].any(dim=0)
        assert rows.sum() == columns.sum() == side
        assert torch.equal(hole, (rows[:, None] & columns).expand(3, -1, -1))
        assert hole.sum() == 3 * side**2
        corners.add((rows.int().argmax().item(), columns.int().argmax().item()))
    assert len(corners) > (2 if share > 0.9 else 10)


@pytest.mark.parametrize("channels", [1, 3])
def test_random_erasing_is_timms(channels: int) -> None:
    plain = evaluation_transform(28, channels=channels, center_crop=1.0)(COLOUR)
    erase = RandomErasing(0.25, mode="pixel", device="cpu")
    num_erased = 0
    for index in range(200):
        found = draw(training_transform(28, channels=channels, random_erasing=0.25, **NOTHING_RANDOM), COLOUR, index)
        with preserve_generators():
            seed_sample(0, 0, index)
            assert torch.equal(found, erase(plain.clone()))
        num_erased += not torch.equal(found, plain)
    assert 30 < num_erased < 70


@pytest.mark.parametrize("cutout", [1.0, -0.5, 0.01])
def test_a_cutout_of_everything_or_nothing_is_refused(cutout: float) -> None:
    with pytest.raises(ValueError, match=f"cutout {cutout} of 8 pixels must be 0 or a side of 1 to 7 pixels"):
        training_transform(8, cutout=cutout)


@pytest.mark.parametrize("make", [training_transform, evaluation_transform])
def test_pixels_have_the_models_mean_and_deviation(make) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    plain, normalized = draw(make(32), COLOUR), draw(make(32, mean=mean, std=std), COLOUR)
    expected = ((plain + 1) / 2 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(normalized, expected, atol=1e-5)
    assert torch.equal(draw(make(32, mean=(0.5,), std=(0.5,)), COLOUR), plain)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(300, 200), (180, 320)])
def test_a_square_is_evaluated_as_timm_does(size: tuple[int, int], interpolation: str) -> None:
    across = np.linspace(0, 1, size[0])[None, :] + 0.3 * np.sin(np.linspace(0, 9, size[1]))[:, None]
    image = Image.fromarray((200 * across / across.max()).clip(0, 255).astype(np.uint8)).convert("RGB")
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    theirs = create_transform((3, 64, 64), interpolation=interpolation, mean=mean, std=std, crop_pct=0.8)
    settings = {"interpolation": interpolation, "mean": mean, "std": std}
    ours = evaluation_transform(64, center_crop=0.8, keep_aspect=True, **settings)
    difference = (ours(image) - theirs(image)).abs()
    assert difference.mean() < 0.03  # of a standard deviation: timm resizes first, and then crops whole pixels
    stretched = evaluation_transform(64, center_crop=0.8, **settings)
    assert (stretched(image) - theirs(image)).abs().mean() > 3 * difference.mean()


@pytest.mark.parametrize("moments", [(None, None), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,), (0.25,))])
@pytest.mark.parametrize("image", [COLOUR, GREY], ids=["colour", "grey"])
@pytest.mark.parametrize(
    "make", [evaluation_transform, partial(training_transform, color_jitter=0.0, policy="randaugment")]
)
def test_bytes_become_the_pixels_of_a_transform_without_them(
    make: Callable[..., Any], image: Image.Image, moments: tuple[Any, Any]
) -> None:
    mean, std = moments
    whole, bytes_ = (make(24, mean=mean, std=std, as_bytes=as_bytes) for as_bytes in (False, True))
    expected, levels = draw(whole, image), draw(bytes_, image)
    assert levels.dtype is torch.uint8 and levels.shape == expected.shape
    finish = BytesToPixels(mean, std)
    for _ in range(2):  # the constants stay as they are
        assert torch.equal(finish(torch.stack([levels, levels.flip(0)]))[0], expected)
    assert finish(expected) is expected


@pytest.mark.parametrize("change", [{"color_jitter": 0.4}, {"cutout": 0.25}, {"random_erasing": 0.5}])
def test_what_changes_pixels_leaves_no_bytes(change: dict[str, float]) -> None:
    settings = {"color_jitter": 0.0, **change}
    whole, bytes_ = (training_transform(24, **settings, as_bytes=as_bytes) for as_bytes in (False, True))
    assert torch.equal(draw(whole, COLOUR), draw(bytes_, COLOUR))
