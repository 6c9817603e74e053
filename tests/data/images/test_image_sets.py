"""Image sets: what they hold, and what they say when files are missing or broken."""

import gzip
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpipe.data import BrokenImage, DataMissing, ImageArray, check_image_set, open_image_set
from tests.data.permissions import bound_by_permissions


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


@pytest.fixture
def imagenet_root(tmp_path: Path) -> Path:
    """Write two classes of ImageNet's layout: three training images and one validation image each."""
    for class_index, wnid in enumerate(("n01440764", "n01443537")):
        for folder, names in (
            ("train", [f"{wnid}_{number}.JPEG" for number in (7, 10026, 18)]),
            ("val", [f"ILSVRC2012_val_0000000{class_index}.JPEG"]),
        ):
            (tmp_path / folder / wnid).mkdir(parents=True)
            for number, name in enumerate(names):
                Image.new("RGB", (40 + number, 30), (100 * class_index, 0, 200)).save(tmp_path / folder / wnid / name)
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
        (0x801, (20, 28, 28), 20 * 784, "begins with 0x00000801"),
        (0x803, (20, 28, 27), 20 * 784, "shape"),
        (0x803, (20, 28, 28), 20 * 784 - 1, "announces 15680 bytes and 15679 follow"),
        (0x803, (20, 28, 28), 20 * 784 + 1, "more follow"),
        (0x803, (0, 28, 28), 0, "0 items"),
        (0x803, (2**32 - 1, 28, 28), 0, "4294967295 items"),
        (0x803, (20,), 0, "shorter than its header"),
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


def test_label_beyond_the_classes_is_refused(fashion_root: Path) -> None:
    write_idx(fashion_root / "train-labels-idx1-ubyte.gz", 0x801, (20,), bytes([10] * 20))
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz has the label 10"):
        open_image_set("fashion_mnist", "train", fashion_root)


def test_imagenet_layout(imagenet_root: Path) -> None:
    train, test = (open_image_set("imagenet", split, imagenet_root) for split in ("train", "test"))
    assert train.class_names == test.class_names == ["n01440764", "n01443537"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1] and test.labels.tolist() == [0, 1]
    assert {train.image(index).size for index in range(3)} == {(40, 30), (41, 30), (42, 30)}
    assert test.image(1).mode == "RGB"


def test_imagenet_opens_in_a_fresh_process(imagenet_root: Path) -> None:
    """Importing torchvision needs the guard first, whoever comes first."""
    call = f"open_image_set('imagenet', 'train', {str(imagenet_root)!r})"
    program = f"from gpipe.data import open_image_set; print(len({call}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "6\n"


def test_imagenet_classes_must_agree(imagenet_root: Path) -> None:
    (imagenet_root / "val" / "n01443537").rename(imagenet_root / "val" / "n99999999")
    with pytest.raises(ValueError, match="different in 'n01443537'; sort the val images"):
        open_image_set("imagenet", "train", imagenet_root)


def test_imagenet_follows_links_in_the_order_of_torchvision(imagenet_root: Path, tmp_path_factory) -> None:
    import gpipe._compat.torchvision  # noqa: F401  (before torchvision)

    # isort: split
    from torchvision.datasets import ImageFolder

    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (imagenet_root / "train" / "n01440764").rename(elsewhere / "images")
    (imagenet_root / "train" / "n01440764").symlink_to(elsewhere / "images")
    for name in ("b", "a/c", "a"):
        (elsewhere / "images" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(elsewhere / "images" / name / "x.PNG")
    train, expected = open_image_set("imagenet", "train", imagenet_root), ImageFolder(imagenet_root / "train")
    assert [(str(train.path(index)), label) for index, label in enumerate(train.labels)] == expected.samples
    assert len(train) == 9


@pytest.mark.parametrize("target", [".", "..", "../..", "../n01443537"])
def test_a_link_that_leads_back_is_refused_by_name(imagenet_root: Path, target: str) -> None:
    (imagenet_root / "train" / "n01443537" / "link").symlink_to(target)
    (imagenet_root / "train" / "n01440764" / "link").symlink_to(target)
    with pytest.raises(ValueError, match=r"train/n0144\S+ leads to \S+ again, whose images .*; remove the link"):
        open_image_set("imagenet", "train", imagenet_root)


def test_a_folder_that_cannot_be_read_is_refused_by_name(imagenet_root: Path) -> None:
    open_image_set("imagenet", "train", imagenet_root)  # which loads what it needs
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are root's alone
        root = shutil.copytree(imagenet_root, folder, dirs_exist_ok=True)
        Path(root).chmod(0o755)
        (unreadable := Path(root) / "train" / "n01440764" / "more").mkdir(0o000)
        message = r"cannot list \S+/n01440764/more: Permission denied; make it readable"
        with bound_by_permissions(), pytest.raises(ValueError, match=message):
            open_image_set("imagenet", "train", root)
        unreadable.rmdir()


def test_a_class_without_images_is_refused_by_name(imagenet_root: Path) -> None:
    for path in (imagenet_root / "val" / "n01443537").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(FileNotFoundError, match=r"val/n01443537 has no image, expected files that end with \.jpg"):
        open_image_set("imagenet", "test", imagenet_root)


def test_grey_and_disguised_files_decode_to_rgb(imagenet_root: Path) -> None:
    """ImageNet has a PNG and some CMYK pictures named .JPEG, and grey ones."""
    train = open_image_set("imagenet", "train", imagenet_root)
    folder = imagenet_root / "train" / "n01440764"
    for path, mode, file_format in zip(
        sorted(folder.iterdir()), ("L", "CMYK", "RGBA"), ("JPEG", "JPEG", "PNG"), strict=True
    ):
        Image.new(mode, (8, 8)).save(path, format=file_format)
    assert [train.image(index).mode for index in range(3)] == ["RGB"] * 3


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: b"no picture", lambda raw: raw[: len(raw) // 2]])
def test_broken_image_names_its_path(imagenet_root: Path, damage) -> None:
    train = open_image_set("imagenet", "train", imagenet_root)
    path = imagenet_root / "train" / "n01440764" / "n01440764_18.JPEG"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BrokenImage, match=f"cannot decode {path}: .+; remove or replace it"):
        train.image(1)


@pytest.mark.parametrize(
    ("name", "looked_for", "tree", "how_to_get"),
    [
        ("fashion_mnist", "train-images-idx3-ubyte.gz", "<data.root>/t10k-labels-idx1-ubyte.gz", "dpkg-deb -x"),
        ("imagenet", "train/*/, val/*/", "<data.root>/val/n01440764/ILSVRC2012_val", "image-net.org"),
        ("cifar10", "/test_batch", "<data.root>/cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"),
        ("cifar100", "/meta", "<data.root>/cifar-100-python/train", "cifar-100-python.tar.gz"),
        ("stanford_cars", "/cars_meta.mat", "<data.root>/stanford_cars/cars_test/00001.jpg", "car_devkit.tgz"),
        ("oxford_pets", "/test.txt", "<data.root>/oxford-iiit-pet/annotations/trainval.txt", "robots.ox.ac.uk"),
        ("food101", "/test.json", "<data.root>/food-101/images/apple_pie/1005649.jpg", "food-101.tar.gz"),
        (
            "fgvc_aircraft",
            "/variants.txt",
            "<data.root>/fgvc-aircraft-2013b/data/images/",
            "fgvc-aircraft-2013b.tar.gz",
        ),
        ("birdsnap", "/test_images.txt", "<data.root>/birdsnap/download/images/", "get_birdsnap.py"),
    ],
)
def test_missing_data_gets_one_message(tmp_path: Path, name: str, looked_for: str, tree: str, how_to_get: str) -> None:
    with pytest.raises(DataMissing) as raised:
        open_image_set(name, "train", tmp_path / "nowhere")
    first, looked_line, *rest = str(raised.value).splitlines()
    assert name in first
    assert looked_line.startswith("Looked for: ") and looked_for in looked_line and f"{tmp_path}/nowhere" in looked_line
    assert rest[0] == "Expected tree:" and tree in "\n".join(rest)
    assert rest[-2].startswith("How to get it: ") and how_to_get in rest[-2]
    assert "data=fashion_mnist_embedded" in rest[-1]


def test_imagenet_without_a_root_is_missing() -> None:
    with pytest.raises(DataMissing, match=r"Looked for: the folder data\.root, which is not set"):
        check_image_set("imagenet")


def test_one_missing_file_is_the_one_looked_for(fashion_root: Path) -> None:
    (fashion_root / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataMissing, match=f"Looked for: t10k-labels-idx1-ubyte.gz in the folder {fashion_root}"):
        open_image_set("fashion_mnist", "train", fashion_root)


def test_flat_val_folder_counts_as_missing(imagenet_root: Path) -> None:
    for folder in (imagenet_root / "val").iterdir():
        for path in folder.iterdir():
            path.rename(imagenet_root / "val" / path.name)
        folder.rmdir()
    with pytest.raises(DataMissing, match=r"Looked for: val/\*/ in"):
        check_image_set("imagenet", imagenet_root)


def test_check_decodes_nothing(fashion_root: Path) -> None:
    for path in fashion_root.iterdir():
        path.write_bytes(b"")
    assert check_image_set("fashion_mnist", fashion_root) == fashion_root


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown image set 'mnist': choose one of imagenet, cifar10, "):
        check_image_set("mnist")
    with pytest.raises(ValueError, match="unknown image set 'mnist'"):
        open_image_set("mnist", "train")
    with pytest.raises(ValueError, match="unknown split 'val': choose one of train, test"):
        open_image_set("fashion_mnist_embedded", "val")


def test_each_image_needs_one_label() -> None:
    with pytest.raises(ValueError, match="3 images have 2 labels"):
        ImageArray(np.zeros((3, 4, 4), np.uint8), np.zeros(2, np.int64), ["a"])
