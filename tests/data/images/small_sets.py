"""Stanford Cars, Oxford Pets, Food-101 and FGVC Aircraft as small folders of their real layout."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

# The label of every image, in the order of its list; the sets keep no order of classes.
LABELS = {"train": [2, 0, 1, 0, 2], "test": [1, 0, 2, 1]}
CLASS_NAMES = {
    "stanford_cars": ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Acura TL Sedan 2012"],
    "oxford_pets": ["Abyssinian", "American Bulldog", "Birman"],
    "food101": ["apple_pie", "baby_back_ribs", "waffles"],
    "fgvc_aircraft": ["707-320", "727-200", "F/A-18"],
}


def write_image(path: Path, number: int) -> None:
    """Write a JPEG whose size tells its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20 + number, 10), (20 * number, 100, 200)).save(path)


def write_annotations(path: Path, names: list[str], labels: list[int]) -> None:
    """Write the struct array of the Stanford Cars' devkit: a bounding box, the class from 1 on, the file."""
    box = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
    annotations = np.zeros((1, len(names)), dtype=[(field, object) for field in (*box, "class", "fname")])
    for index, (name, label) in enumerate(zip(names, labels, strict=True)):
        annotations[0, index] = (np.uint16(3), np.uint16(2), np.uint16(18), np.uint16(9), np.uint8(label + 1), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": annotations})


def write_stanford_cars(root: Path) -> None:
    folder = root / "stanford_cars"
    for split, listing in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        names = [f"{number:05}.jpg" for number in range(1, len(LABELS[split]) + 1)]
        write_annotations(folder / listing, names, LABELS[split])
        for number, name in enumerate(names):
            write_image(folder / f"cars_{split}" / name, number)
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": np.array([CLASS_NAMES["stanford_cars"]], object)})


def write_oxford_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    breeds = (("Abyssinian", 1, 1), ("american_bulldog", 2, 1), ("Birman", 1, 2))
    for split, listing in (("train", "trainval"), ("test", "test")):
        lines = []
        for number, label in enumerate(LABELS[split]):
            breed, species, breed_id = breeds[label]
            name = f"{breed}_{number + 100 * (split == 'test')}"
            lines.append(f"{name} {label + 1} {species} {breed_id}\n")
            write_image(folder / "images" / f"{name}.jpg", number)
        (folder / "annotations" / f"{listing}.txt").write_text("".join(lines))


def write_food101(root: Path) -> None:
    folder = root / "food-101"
    (folder / "meta").mkdir(parents=True)
    class_names = CLASS_NAMES["food101"]
    (folder / "meta" / "classes.txt").write_text("".join(f"{name}\n" for name in class_names))
    for split, labels in LABELS.items():
        listing: dict[str, list[str]] = {}
        for number, label in enumerate(labels):
            name = f"{class_names[label]}/{1005649 + number + 100 * (split == 'test')}"
            listing.setdefault(class_names[label], []).append(name)
            write_image(folder / "images" / f"{name}.jpg", number)
        (folder / "meta" / f"{split}.json").write_text(json.dumps(listing))


def write_fgvc_aircraft(root: Path) -> None:
    folder = root / "fgvc-aircraft-2013b" / "data"
    (folder / "images").mkdir(parents=True)
    variants = CLASS_NAMES["fgvc_aircraft"]
    (folder / "variants.txt").write_text("".join(f"{name}\n" for name in variants))
    for split, listing in (("train", "trainval"), ("test", "test")):
        lines = []
        for number, label in enumerate(LABELS[split]):
            name = f"{1025794 + number + 100 * (split == 'test'):07}"
            lines.append(f"{name} {variants[label]}\n")
            write_image(folder / "images" / f"{name}.jpg", number)
        (folder / f"images_variant_{listing}.txt").write_text("".join(lines))


WRITERS: dict[str, Callable[[Path], None]] = {
    "stanford_cars": write_stanford_cars,
    "oxford_pets": write_oxford_pets,
    "food101": write_food101,
    "fgvc_aircraft": write_fgvc_aircraft,
}
