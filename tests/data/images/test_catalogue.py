"""The table of image sets: the numbers of Table 4, the messages about missing data, and that looking loads nothing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from gpipe.data import (
    IMAGE_SETS,
    DataMissing,
    ImageArray,
    check_data,
    check_image_set,
    count_differences,
    open_image_set,
)

CONF = Path(__file__).parents[3] / "conf" / "data"
# Typed from the paper's Table 4 once more: classes, training images, test images.
TABLE_4 = {
    "imagenet": (1000, 1281167, 50000),
    "cifar10": (10, 50000, 10000),
    "cifar100": (100, 50000, 10000),
    "stanford_cars": (196, 8144, 8041),
    "oxford_pets": (37, 3680, 3369),
    "food101": (101, 75750, 25250),
    "fgvc_aircraft": (100, 6667, 3333),
    "birdsnap": (500, 47386, 2443),
}


def made_up(num_classes: int, num_images: int) -> ImageArray:
    names = [str(number) for number in range(num_classes)]
    return ImageArray(np.zeros((num_images, 0, 0), np.uint8), np.zeros(num_images, np.int64), names)


@pytest.mark.parametrize("name", TABLE_4)
def test_a_set_with_the_numbers_of_table_4_has_no_differences(name: str) -> None:
    num_classes, num_train_images, num_test_images = TABLE_4[name]
    assert count_differences(name, "train", made_up(num_classes, num_train_images)) == []
    assert count_differences(name, "test", made_up(num_classes, num_test_images)) == []


def test_the_sets_of_table_4_are_those_that_have_its_numbers() -> None:
    assert [name for name, source in IMAGE_SETS.items() if source.table is not None] == list(TABLE_4)


def test_every_set_has_a_file_of_settings_with_its_number_of_classes() -> None:
    for name, source in IMAGE_SETS.items():
        settings = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        assert settings["name"] == name
        if source.table is not None:
            assert settings["num_classes"] == source.table.num_classes, name


def test_each_number_that_differs_gets_a_sentence_with_both() -> None:
    assert count_differences("cifar10", "train", made_up(9, 1234)) == [
        "cifar10 has 9 classes, but Table 4 of the paper says 10",
        "cifar10 has 1,234 training images, but Table 4 of the paper says 50,000",
    ]


def test_a_true_copy_of_oxford_pets_has_other_test_images_than_the_paper_says() -> None:
    assert count_differences("oxford_pets", "train", made_up(37, 3680)) == []
    assert count_differences("oxford_pets", "test", made_up(37, 3669)) == [
        (
            "oxford_pets has 3,669 test images, but Table 4 of the paper says 3,369 "
            "(the set's own list has 3,669; the paper's number looks like a misprint)"
        )
    ]
    assert "misprint" not in count_differences("oxford_pets", "train", made_up(37, 1))[0]


def test_a_set_outside_the_table_has_no_differences() -> None:
    embedded = open_image_set("fashion_mnist_embedded", "test")
    assert count_differences("fashion_mnist_embedded", "test", embedded) == []


def test_differences_of_an_unknown_set_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown image set 'mnist'"):
        count_differences("mnist", "train", made_up(1, 1))


def test_looking_for_a_set_imports_no_heavy_package(tmp_path: Path) -> None:
    program = f"""
import sys
from gpipe.data import IMAGE_SETS, DataMissing, check_image_set
for name, source in IMAGE_SETS.items():
    try:
        check_image_set(name, {str(tmp_path)!r} if source.required else None)
    except DataMissing:
        print(name)
print(sorted({{"torch", "torchvision", "sklearn", "mlxtend", "scipy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *missing, heavy = done.stdout.splitlines()
    assert missing == ["image_folder", "image_table", *TABLE_4, "fashion_mnist"]
    assert heavy == "[]"


@pytest.mark.parametrize(
    ("name", "looked_for", "tree", "how_to_get"),
    [
        ("fashion_mnist", "train-images-idx3-ubyte.gz", "<data.root>/t10k-labels-idx1-ubyte.gz", "dpkg-deb -x"),
        ("imagenet", "train/*/, val/*/", "<data.root>/val/n01440764/ILSVRC2012_val", "image-net.org"),
        ("cifar10", "/test_batch", "<data.root>/cifar-10-batches-py/data_batch_1", "cifar-10-python.tar.gz"),
        ("cifar100", "/meta", "<data.root>/cifar-100-python/train", "cifar-100-python.tar.gz"),
        ("stanford_cars", "/cars_meta.mat", "<data.root>/stanford_cars/cars_test/", "car_devkit.tgz"),
        ("oxford_pets", "/test.txt", "<data.root>/oxford-iiit-pet/annotations/trainval.txt", "robots.ox.ac.uk"),
        ("food101", "/test.json", "<data.root>/food-101/images/*/", "food-101.tar.gz"),
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


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown image set 'mnist': choose one of image_folder, image_table, "):
        check_image_set("mnist")
    with pytest.raises(ValueError, match="unknown image set 'mnist'"):
        open_image_set("mnist", "train")
    with pytest.raises(ValueError, match="unknown split 'val': choose one of train, test"):
        open_image_set("fashion_mnist_embedded", "val")


@pytest.mark.parametrize("name", ["digits", "random_images", "multilingual_embedded", "random_tokens"])
def test_a_folder_for_data_that_are_in_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"data.root is /elsewhere, but data.name is {name}, which reads no folder"):
        check_data(name, "/elsewhere")


def test_a_name_that_no_reader_has_is_refused_with_those_for_own_data() -> None:
    with pytest.raises(ValueError, match=r"data.name is cats, expected one of .* set data.name=image_folder"):
        check_data("cats", "/elsewhere")


def test_own_images_need_a_folder() -> None:
    with pytest.raises(DataMissing, match="image_folder is missing"):
        check_data("image_folder")
