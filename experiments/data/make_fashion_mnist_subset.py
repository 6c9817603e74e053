"""Make the embedded Fashion-MNIST subset from the full set.

    python -m experiments.data.make_fashion_mnist_subset [--root FOLDER]

Takes the first 600 training images and the first 100 test images of each class, in the order of the original files.
Needs Debian's package dataset-fashion-mnist, or its four files in FOLDER. The result is always the same. A few seconds.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpipe.data import open_image_set

IMAGES_PER_CLASS = {"train": 600, "test": 100}
DEFAULT_OUTPUT = Path(__file__).parents[2] / "src" / "gpipe" / "data" / "embedded" / "fashion_mnist_subset.npz"


def find_first_of_each_class(labels: NDArray[np.int64], num_images: int) -> NDArray[np.int64]:
    """Return the indices of the first num_images of each class, ascending, shape [num_images x classes]."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:num_images] for label in np.unique(labels)]))


def make_subset(root: Path | None) -> dict[str, NDArray[np.uint8]]:
    """Return the images uint8 [n, 28, 28] and labels uint8 [n] of both splits, as `train_images` and so on."""
    arrays = {}
    for split, num_images in IMAGES_PER_CLASS.items():
        image_set = open_image_set("fashion_mnist", split, root)
        chosen = find_first_of_each_class(image_set.labels, num_images)
        arrays[f"{split}_images"] = np.stack([np.asarray(image_set.image(int(index))) for index in chosen])
        arrays[f"{split}_labels"] = image_set.labels[chosen].astype(np.uint8)
    return arrays


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with the four original files; default: Debian's place")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the file to write")
    arguments = parser.parse_args()
    np.savez_compressed(arguments.output, allow_pickle=False, **make_subset(arguments.root))
    print(f"wrote {arguments.output}: {arguments.output.stat().st_size / 1e6:.1f} MB")
