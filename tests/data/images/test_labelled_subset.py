"""Few labelled images and a validation split: stratified, by seed, apart from each other, and nested."""

import numpy as np
import pytest

from gpipe.data import ImageArray, ImageSet, open_image_set
from gpipe.data.images.labelled_subset import ImageSubset, order_by_class, split_training_images


def numbered(labels: list[int]) -> ImageArray:
    """A set whose image i is filled with i."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), dtype=np.uint8)
    return ImageArray(images, np.array(labels), [str(label) for label in sorted({*labels})])


def members(image_set: ImageSet) -> set[int]:
    return {int(np.asarray(image_set.image(index))[0, 0]) for index in range(len(image_set))}


SET = numbered([0] * 30 + [1] * 20 + [2] * 10)


def test_a_subset_has_the_images_and_labels_of_its_positions() -> None:
    subset = ImageSubset(SET, np.array([31, 2, 50]))
    assert len(subset) == 3 and subset.labels.tolist() == [1, 0, 2] and subset.class_names == SET.class_names
    assert [int(np.asarray(subset.image(index))[0, 0]) for index in range(3)] == [31, 2, 50]


def test_the_choice_takes_a_class_after_the_other_and_each_image_once() -> None:
    order = order_by_class(SET.labels, seed=3)
    assert sorted(order) == list(range(60))
    labels = SET.labels[order].tolist()
    assert labels[:30] == [0, 1, 2] * 10 and labels[30:50] == [0, 1] * 10 and labels[50:] == [0] * 10


@pytest.mark.parametrize("num_images", [3, 7, 30])
def test_each_class_has_as_many_images_as_possible(num_images: int) -> None:
    train, valid = split_training_images("numbers", SET, num_images, None, seed=0)
    counts = np.bincount(train.labels)
    assert len(train) == num_images and counts.max() - counts.min() <= 1 and valid is None


def test_fewer_images_are_among_more_and_the_validation_images_are_others_and_always_the_same() -> None:
    splits = [split_training_images("numbers", SET, number, 12, seed=0) for number in (5, 20, None)]
    few, more, rest = (members(train) for train, _ in splits)
    kept = {frozenset(members(valid)) for _, valid in splits if valid is not None}
    assert few < more < rest and len(rest) == 48
    assert len(kept) == 1 and not rest & next(iter(kept))
    assert np.bincount(splits[0][1].labels).tolist() == [4, 4, 4]


def test_no_class_is_held_out_as_a_whole() -> None:
    uneven = numbered([0] * 40 + [1] * 20 + [2] * 3 + [3])
    train, valid = split_training_images("numbers", uneven, None, 60, seed=0)
    assert valid is not None and np.bincount(train.labels).tolist() == [1, 1, 1, 1]
    assert members(train) | members(valid) == set(range(64)) and len(valid) == 60
    with pytest.raises(ValueError, match=r"data.validation_images is 61, but numbers has 64 training images: lower"):
        split_training_images("numbers", uneven, 2, 61, seed=0)


def test_the_seed_chooses_the_images_and_nothing_else_does() -> None:
    one, again, other = (members(split_training_images("numbers", SET, 6, None, seed)[0]) for seed in (0, 0, 1))
    assert one == again != other


def test_the_digits_of_a_seed_stay_the_same() -> None:
    train, valid = split_training_images("digits", open_image_set("digits", "train"), 50, 100, seed=0)
    assert np.bincount(train.labels).tolist() == [5] * 10 and np.bincount(valid.labels).tolist() == [10] * 10


def test_without_a_limit_the_set_itself_is_trained_on() -> None:
    assert split_training_images("numbers", SET, None, None, seed=0) == (SET, None)


@pytest.mark.parametrize(
    ("max_images", "validation_images", "given", "remedy"),
    [
        (61, None, "data.max_images is 61", "lower it to at most 60"),
        (50, 11, "data.max_images is 50 and data.validation_images is 11", "lower them to at most 60 together"),
        (None, 60, "data.validation_images is 60", "lower it to at most 57"),
    ],
)
def test_too_many_images_are_refused_with_the_numbers(
    max_images: int | None, validation_images: int | None, given: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"^{given}, but numbers has 60 training images: {remedy}.$"):
        split_training_images("numbers", SET, max_images, validation_images, seed=0)


def test_images_of_several_labels_are_not_stratified() -> None:
    several = ImageSubset(SET, np.arange(4))
    several.labels = np.ones((4, 3), dtype=bool)
    with pytest.raises(ValueError, match="may have several labels: set both to null"):
        split_training_images("table", several, 2, None, seed=0)
