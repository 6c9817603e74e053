"""CIFAR-10 and CIFAR-100: what the original pickles hold, and that no other pickle is ever read."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpipe.data import open_image_set
from gpipe.data.images.torchvision_sets import torchvision_class

CLASS_NAMES = {"cifar10": ["airplane", "automobile", "bird"], "cifar100": ["apple", "aquarium_fish", "baby"]}
TORCHVISION = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}


class Trap:
    """Leave a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write_pickle(path: Path, content: object) -> str:
    """Write as Python 2 did, and return the md5 checksum."""
    raw = pickle.dumps(content, protocol=2)
    path.write_bytes(raw)
    return hashlib.md5(raw).hexdigest()


def batch(num_images: int, label_key: str, seed: int) -> dict[str, object]:
    generator = np.random.default_rng(seed)
    return {
        "data": generator.integers(0, 256, (num_images, 3072), dtype=np.uint8),
        label_key: generator.integers(0, 3, num_images).tolist(),
    }


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch) -> Path:
    """Write both sets, 4 images a file, as the files that torchvision takes for the originals."""
    for name, label_key in (("cifar10", "labels"), ("cifar100", "fine_labels")):
        cifar = torchvision_class(TORCHVISION[name])
        folder = tmp_path / cifar.base_folder
        folder.mkdir()
        for attribute in ("train_list", "test_list"):
            files = [file_name for file_name, _ in getattr(cifar, attribute)]
            written = [
                [file, write_pickle(folder / file, batch(4, label_key, seed))] for seed, file in enumerate(files)
            ]
            monkeypatch.setattr(cifar, attribute, written)
        checksum = write_pickle(folder / cifar.meta["filename"], {cifar.meta["key"]: CLASS_NAMES[name]})
        monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": checksum})
    return tmp_path


@pytest.mark.parametrize(("name", "num_train_images"), [("cifar10", 20), ("cifar100", 4)])
@pytest.mark.parametrize("split", ["train", "test"])
def test_cifar_is_what_torchvision_reads(cifar_root: Path, name: str, split: str, num_train_images: int) -> None:
    image_set = open_image_set(name, split, cifar_root)
    oracle = torchvision_class(TORCHVISION[name])(cifar_root, train=split == "train")
    assert len(image_set) == len(oracle) == (num_train_images if split == "train" else 4)
    assert image_set.class_names == CLASS_NAMES[name]
    assert image_set.labels.dtype == np.int64
    for index, (image, label) in enumerate(oracle):
        assert image_set.labels[index] == label
        assert image_set.image(index).mode == "RGB"
        assert image_set.image(index).tobytes() == image.tobytes()


def test_a_pixel_of_cifar_is_where_the_format_says(cifar_root: Path) -> None:
    """An image is 1,024 bytes of red, then of green, then of blue, each row by row."""
    content = pickle.loads((cifar_root / "cifar-10-batches-py" / "data_batch_2").read_bytes())
    image = open_image_set("cifar10", "train", cifar_root).image(4 + 3)
    red, green, blue = content["data"][3].reshape(3, 32, 32)[:, 5, 30].tolist()
    assert image.getpixel((30, 5)) == (red, green, blue)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_3"),
        ("cifar10", "cifar-10-batches-py/test_batch"),
        ("cifar10", "cifar-10-batches-py/batches.meta"),
        ("cifar100", "cifar-100-python/train"),
        ("cifar100", "cifar-100-python/meta"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_changed_pickle_is_named_and_never_read(cifar_root: Path, name: str, path: str, split: str) -> None:
    write_pickle(cifar_root / path, Trap(cifar_root / "sprung"))
    with pytest.raises(
        ValueError, match=f"^{cifar_root / path} is not the original file.*unpack {name[:5]}-10.*again$"
    ):
        open_image_set(name, split, cifar_root)
    assert not (cifar_root / "sprung").exists()


def test_the_trap_springs_where_it_is_read(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()
