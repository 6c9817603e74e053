"""Mixed mini-batches against timm's own class, called directly."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gpipe.data import Batch, ImageArray, ImageLoader, Mixing, training_transform
from gpipe.data.randomness import preserve_generators, seed_mini_batch

# isort: split
from timm.data.mixup import Mixup

NUM_IMAGES, NUM_CLASSES, SIZE, SEED = 26, 5, 12, 3
METHODS = {"mixup": (0.8, 0.0), "cutmix": (0.0, 1.0), "both": (0.8, 1.0)}


@pytest.fixture(scope="module")
def image_set() -> ImageArray:
    levels = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 16, 16), np.uint8)
    return ImageArray(levels, np.arange(NUM_IMAGES) % NUM_CLASSES, list("abcde"))


@pytest.fixture
def make(image_set: ImageArray) -> Callable[..., ImageLoader]:
    """Return a maker of loaders of augmented images, some of them erased; they are not mixed without `method`."""
    transform = training_transform(SIZE, channels=1, random_erasing=0.5)

    def make(method: str | None = None, *, batch_size: int = 4, size: int = SIZE, **settings) -> ImageLoader:
        mixing = None
        if method is not None:
            mixup, cutmix = METHODS[method]
            mixing = Mixing(mixup=mixup, cutmix=cutmix, num_classes=NUM_CLASSES, image_size=size)
        settings = {"seed": SEED, "num_workers": 0, "shuffle": True, "drop_last": True, "mixing": mixing, **settings}
        return ImageLoader(image_set, batch_size, transform, **settings)

    return make


def batches_of(loader: ImageLoader, epoch: int = 0, start: int = 0) -> list[Batch]:
    loader.set_epoch(epoch)
    loader.batch_numbers = range(start, len(loader))
    try:
        return list(loader)
    finally:
        loader.close()


def mixed_by_timm(batches: list[Batch], method: str, epoch: int = 0, seed: int = SEED) -> list[Batch]:
    """What timm makes of whole mini-batches."""
    mix = Mixup(*METHODS[method], label_smoothing=0.0, num_classes=NUM_CLASSES)
    mixed = []
    for number, (images, labels) in enumerate(batches):
        assert images is not None
        with preserve_generators():
            seed_mini_batch(seed, epoch, number)
            mixed.append(mix(images.clone(), labels))
    return mixed


def assert_equal_batches(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs) > 0
    for (images, targets), (other_images, other_targets) in zip(ours, theirs, strict=True):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_mini_batch_is_what_timm_makes_of_it(make, method: str, epoch: int) -> None:
    plain = batches_of(make(), epoch)
    mixed = batches_of(make(method), epoch)
    assert_equal_batches(mixed, mixed_by_timm(plain, method, epoch))
    assert not any(torch.equal(images, before) for (images, _), (before, _) in zip(mixed, plain, strict=True))
    assert all(targets.dtype == torch.float32 and targets.shape == (4, NUM_CLASSES) for _, targets in mixed)


@pytest.mark.parametrize("method", METHODS)
def test_a_process_without_images_draws_the_same_targets(make, method: str) -> None:
    with_images, without = batches_of(make(method)), batches_of(make(method, load_images=False))
    for (_, targets), (images, others) in zip(with_images, without, strict=True):
        assert images is None and torch.equal(targets, others)


def test_targets_are_the_shares_of_what_is_in_the_images(image_set: ImageArray) -> None:
    """Of two images of one level each, the level and the number of pixels tell the weights."""
    labels = torch.tensor([1, 3])
    for method, (mixup, cutmix) in METHODS.items():
        mixing = Mixing(mixup=mixup, cutmix=cutmix, num_classes=NUM_CLASSES, image_size=20)
        for number in range(20):
            images = torch.stack([torch.zeros(3, 20, 20), torch.ones(3, 20, 20)])
            mixing.mix_images(images, SEED, 0, number)
            targets = mixing.mix_labels(labels, SEED, 0, number)
            shares = images.mean((1, 2, 3))
            assert torch.allclose(targets[:, 3], shares, atol=1e-6), method
            assert torch.allclose(targets[:, 1], 1 - shares, atol=1e-6), method


def test_both_methods_are_taken_and_every_mini_batch_draws_anew() -> None:
    mixing = Mixing(mixup=0.8, cutmix=1.0, num_classes=2, image_size=20)
    keys = [(seed, epoch, number) for seed in (0, 1) for epoch in (0, 1) for number in range(10)]
    outcomes = []
    for key in keys:
        images = torch.stack([torch.zeros(1, 20, 20), torch.ones(1, 20, 20)])
        mixing.mix_images(images, *key)
        outcomes.append(images)
    num_blended = sum(((images > 0) & (images < 1)).any().item() for images in outcomes)
    assert 10 < num_blended < 30
    assert len({tuple(images.flatten().tolist()) for images in outcomes}) == len(keys)


@pytest.mark.parametrize("num_workers", [0, 1])  # one, because a worker takes a second or more to load timm
def test_resume_equals_the_tail_of_the_uninterrupted_epoch_in_a_worker_too(make, num_workers: int) -> None:
    whole = batches_of(make("both"), epoch=1)
    assert_equal_batches(batches_of(make("both", num_workers=num_workers), epoch=1, start=2), whole[2:])


@pytest.mark.parametrize("load_images", [False, True])
def test_global_generators_neither_matter_nor_change(make, load_images: bool) -> None:
    def seed_all() -> None:
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)

    expected = batches_of(make("both", load_images=load_images))
    seed_all()
    found = batches_of(make("both", load_images=load_images))
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    seed_all()
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    for (images, targets), (other_images, other_targets) in zip(found, expected, strict=True):
        assert torch.equal(targets, other_targets)
        assert images is other_images is None or torch.equal(images, other_images)


@pytest.mark.parametrize("method", METHODS)
def test_each_replica_mixes_within_its_own_part(make, method: str) -> None:
    for replica in range(3):
        share = {"replica_index": replica, "num_replicas": 3}
        plain, mixed = batches_of(make(**share)), batches_of(make(method, **share))
        assert_equal_batches(mixed, mixed_by_timm(plain, method))


def test_an_odd_number_of_images_is_refused(make) -> None:
    with pytest.raises(ValueError, match="batch_size 3 must be even"):
        make("mixup", batch_size=3)
    with pytest.raises(ValueError, match="batch_size 4 must be even, with drop_last=True"):
        make("mixup", drop_last=False)


def test_images_of_another_size_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"images of \(12, 12\) pixels must be squares of 11"):
        batches_of(make("cutmix", size=11))
