"""The loader: its batches are a function of the seed, whoever decodes them and wherever one starts."""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe.data import (
    Batch,
    BrokenImage,
    ImageArray,
    ImageFiles,
    ImageLoader,
    evaluation_transform,
    open_image_set,
    training_transform,
)

NUM_IMAGES = 22


@pytest.fixture(scope="module")
def image_set() -> ImageArray:
    """Return a few photographs whose labels are their indices."""
    photographs = open_image_set("fashion_mnist_embedded", "test")
    images = np.stack([np.asarray(photographs.image(index)) for index in range(NUM_IMAGES)])
    return ImageArray(images, np.arange(NUM_IMAGES), [str(index) for index in range(NUM_IMAGES)])


@pytest.fixture
def make(image_set: ImageArray) -> Iterator[Callable[..., ImageLoader]]:
    """Return a maker of loaders with augmentation; its arguments change single settings.

    They are closed afterwards: garbage collection would take five seconds per worker process.
    """
    loaders = []

    def make(batch_size: int = 4, *, seed: int = 3, **settings) -> ImageLoader:
        settings = {"shuffle": True, "num_workers": 0, **settings}
        loaders.append(ImageLoader(image_set, batch_size, training_transform(16, channels=1), seed, **settings))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def assert_equal_batches(ours: list[Batch], theirs: list[Batch]) -> None:
    assert len(ours) == len(theirs)
    for (images, labels), (other_images, other_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(labels, other_labels) and torch.equal(images, other_images)


def images_by_label(loader: ImageLoader) -> dict[int, torch.Tensor]:
    return {int(label): image for images, labels in loader for image, label in zip(images, labels, strict=True)}


def labels_of(loader: ImageLoader) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_change_nothing_in_any_epoch(make, num_workers: int) -> None:
    alone, helped = make(), make(num_workers=num_workers)
    for epoch in (0, 1, 5):
        alone.set_epoch(epoch)
        helped.set_epoch(epoch)
        assert_equal_batches(list(helped), list(alone))


def test_workers_survive_an_iteration_that_is_abandoned(make) -> None:
    alone, helped = make(), make(num_workers=2)
    next(iter(helped))
    helped.set_epoch(1)
    alone.set_epoch(1)
    assert_equal_batches(list(helped), list(alone))


def test_augmentation_does_not_depend_on_the_batch(make) -> None:
    by_four, by_seven, in_order = (images_by_label(loader) for loader in (make(4), make(7), make(4, shuffle=False)))
    assert by_four.keys() == by_seven.keys() == in_order.keys() == set(range(NUM_IMAGES))
    for label, image in by_four.items():
        assert torch.equal(image, by_seven[label]) and torch.equal(image, in_order[label])


@pytest.mark.parametrize("policy", ["autoaugment", "randaugment"])
def test_a_whole_recipe_is_a_function_of_the_sample(image_set: ImageArray, policy: str) -> None:
    transform = training_transform(16, policy=policy, cutout=0.3)
    first, second = (
        images_by_label(ImageLoader(image_set, size, transform, 3, shuffle=True, num_workers=num_workers))
        for size, num_workers in ((4, 2), (7, 0))
    )
    for label, image in first.items():
        assert torch.equal(image, second[label])


def test_epochs_and_seeds_differ_in_order_and_augmentation(make) -> None:
    first, next_epoch, other_seed = make(), make(), make(seed=4)
    next_epoch.set_epoch(1)
    for other in (next_epoch, other_seed):
        assert labels_of(first) != labels_of(other)
        ours, theirs = images_by_label(first), images_by_label(other)
        assert not any(torch.equal(ours[label], theirs[label]) for label in ours)


def test_the_same_epoch_again_is_the_same(make) -> None:
    loader = make()
    first_time = list(loader)
    loader.set_epoch(1)
    list(loader)
    loader.set_epoch(0)
    assert_equal_batches(list(loader), first_time)


def test_a_loader_that_is_closed_ends_its_workers_at_once_and_may_go_on_with_new_ones(make) -> None:
    before = set(multiprocessing.active_children())
    helped = make(num_workers=2)
    left = iter(helped)  # in the middle of an iteration, which nobody goes on with
    next(left)
    assert len(set(multiprocessing.active_children()) - before) == 2
    helped.close()
    assert not set(multiprocessing.active_children()) - before
    assert_equal_batches(list(helped), list(make()))
    helped.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_generators_neither_matter_nor_change(make, num_workers: int) -> None:
    expected = list(make())
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    found = list(make(num_workers=num_workers))
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    assert_equal_batches(found, expected)


def test_transforms_may_draw_from_any_global_generator(image_set: ImageArray) -> None:
    """Timm's automatic augmentations draw from random and numpy."""

    def noise(image: Image.Image) -> torch.Tensor:
        return torch.tensor([torch.rand(1).item(), np.random.rand(), random.random()])

    draws = [list(ImageLoader(image_set, size, noise, 0, shuffle=False, num_workers=0)) for size in (NUM_IMAGES, 5)]
    assert torch.equal(draws[0][0][0], torch.cat([images for images, _ in draws[1]]))
    assert len(draws[0][0][0].unique()) == 3 * NUM_IMAGES


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_equals_the_tail_of_the_uninterrupted_epoch(make, num_workers: int) -> None:
    uninterrupted, resumed = make(), make(num_workers=num_workers)
    uninterrupted.set_epoch(2)
    resumed.set_epoch(2)
    resumed.batch_numbers = range(4, len(resumed))
    assert len(resumed) == len(uninterrupted) == 6
    assert_equal_batches(list(resumed), list(uninterrupted)[4:])
    resumed.set_epoch(3)
    assert resumed.batch_numbers is None


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_shares", [1, 2, 4, 9])
def test_an_evaluation_set_is_shared_out_by_mini_batches(make, num_shares: int, num_workers: int) -> None:
    whole = list(make(shuffle=False))
    loader = make(shuffle=False, num_workers=num_workers)
    for share in range(num_shares):
        loader.set_epoch(0)
        loader.batch_numbers = range(len(loader))[share::num_shares]
        assert_equal_batches(list(loader), whole[share::num_shares])
    loader.set_epoch(0)
    loader.batch_numbers = [0, 1, 3]
    assert_equal_batches(list(loader), [whole[number] for number in loader.batch_numbers])


def test_resume_at_the_end_of_an_epoch_yields_nothing(make) -> None:
    loader = make()
    loader.batch_numbers = range(len(loader), len(loader))
    assert list(loader) == []
    loader.batch_numbers = [5, 6]
    with pytest.raises(ValueError, match=r"batch_numbers \[5, 6\] must ascend and lie in 0 to 5"):
        next(iter(loader))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_share_the_mini_batch_of_one_replica(make, num_replicas: int) -> None:
    """With three replicas the last mini-batch has 4 images: parts of 2, 1 and 1."""
    whole = list(make(3 * num_replicas))
    replicas = [list(make(3, replica_index=index, num_replicas=num_replicas)) for index in range(num_replicas)]
    assert {len(batches) for batches in replicas} == {len(whole)}
    for step, (images, labels) in enumerate(whole):
        for index, batches in enumerate(replicas):
            assert torch.equal(batches[step][0], images[index::num_replicas])
            assert torch.equal(batches[step][1], labels[index::num_replicas])


def test_no_replica_is_left_without_an_image(make) -> None:
    with pytest.raises(ValueError, match=r"the last mini-batch has 1 image\(s\) for 3 replicas: .* or drop_last"):
        make(1, replica_index=0, num_replicas=3)
    assert len(make(1, replica_index=0, num_replicas=3, drop_last=True)) == 7


def test_last_small_batch_is_kept_unless_dropped(make) -> None:
    assert [len(labels) for _, labels in make(5)] == [5, 5, 5, 5, 2]
    assert [len(labels) for _, labels in make(5, drop_last=True)] == [5, 5, 5, 5]
    assert len(make(5)) == 5 and len(make(5, drop_last=True)) == 4


def test_without_shuffling_the_order_is_the_sets(make) -> None:
    loader = make(10, shuffle=False)
    loader.set_epoch(6)
    assert [label for labels in labels_of(loader) for label in labels] == list(range(NUM_IMAGES))


class LabelsOnly(ImageArray):
    """Fail where an image is decoded."""

    def image(self, index: int) -> Image.Image:
        raise AssertionError("an image was decoded")


def test_labels_come_alone_and_undecoded(make, image_set: ImageArray) -> None:
    undecodable = LabelsOnly(np.zeros((NUM_IMAGES, 28, 28), np.uint8), image_set.labels, image_set.class_names)
    labels_only = ImageLoader(
        undecodable, 4, evaluation_transform(8), 3, shuffle=True, num_workers=2, load_images=False
    )
    with_images = make()
    for epoch in (0, 1):
        labels_only.set_epoch(epoch)
        with_images.set_epoch(epoch)
        assert [images for images, _ in labels_only] == [None] * 6
        assert labels_of(labels_only) == labels_of(with_images)


def test_batches_have_the_promised_types(make) -> None:
    images, labels = next(iter(make()))
    assert images.dtype == torch.float32 and images.shape == (4, 1, 16, 16) and images.is_contiguous()
    assert labels.dtype == torch.int64 and labels.shape == (4,)


def test_images_of_several_shapes_are_refused(image_set: ImageArray) -> None:
    """Even where one could be repeated to fit the other."""

    def transform(image: Image.Image) -> torch.Tensor:
        return torch.zeros(3 if np.asarray(image).sum() % 2 else 1, 2, 2)

    loader = ImageLoader(image_set, NUM_IMAGES, transform, 0, shuffle=False, num_workers=0)
    with pytest.raises(ValueError, match=r"images of the shapes \(\d, 2, 2\) and \(\d, 2, 2\): they must all have"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_broken_image_is_named_in_one_line(tmp_path: Path, num_workers: int) -> None:
    for index in range(6):
        Image.new("RGB", (9, 9)).save(tmp_path / f"{index}.png")
    (tmp_path / "4.png").write_bytes(b"no picture")
    files = ImageFiles(tmp_path, [f"{index}.png" for index in range(6)], [0] * 6, ["a"])
    loader = ImageLoader(files, 2, evaluation_transform(8), 0, shuffle=False, num_workers=num_workers)
    batches = iter(loader)
    assert [len(next(batches)[1]) for _ in range(2)] == [2, 2]
    with pytest.raises(BrokenImage) as raised:
        next(batches)
    loader.close()
    message = str(raised.value)
    assert message.startswith(f"cannot decode {tmp_path / '4.png'}: ") and "; remove or replace it, or raise" in message
    assert "\n" not in message and "Traceback" not in message


def test_time_waited_for_data_is_counted(image_set: ImageArray) -> None:
    def transform(_image: Image.Image) -> torch.Tensor:
        time.sleep(0.005)
        return torch.zeros(1, 2, 2)

    loader = ImageLoader(image_set, 4, transform, 0, shuffle=False, num_workers=0)
    waited = [loader.wait_seconds for _ in loader]
    assert waited == sorted(waited)
    assert waited[0] >= 4 * 0.005 and loader.wait_seconds >= NUM_IMAGES * 0.005


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 23, "drop_last": True}, "22 images are too few for a mini-batch of 23"),
        ({"seed": -1}, "seed -1"),
        ({"replica_index": 2, "num_replicas": 2}, "replica_index 2"),
        ({"replica_index": 0, "num_replicas": 0}, "replica_index 0"),
    ],
)
def test_settings_out_of_range_are_refused(make, settings: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make(**settings)
