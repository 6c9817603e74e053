"""Write the embedded photographs to a folder, in the layout that `data=image_folder` reads.

    python -m experiments.data.write_photographs FOLDER

FOLDER/train/<class>/<number>.png and FOLDER/val/<class>/<number>.png: 6,000 and 1,000 images of 28 x 28 pixels.
"""

import argparse
import shlex
from pathlib import Path

from gpipe.config.literally import make_word
from gpipe.data import open_image_set

FOLDERS = {"train": "train", "test": "val"}


def write_photographs(folder: Path) -> None:
    """Write both splits.

    Raises:
        FileExistsError: the folder of a class is there.
    """
    for split, name in FOLDERS.items():
        images = open_image_set("fashion_mnist_embedded", split)
        classes = [folder / name / class_name.replace("/", "-").replace(" ", "_") for class_name in images.class_names]
        for place in classes:
            place.mkdir(parents=True)
        for index, label in enumerate(images.labels.tolist()):
            images.image(index).save(classes[label] / f"{index:04}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; it must not have images yet")
    options = parser.parse_args()
    try:
        write_photographs(options.folder)
    except FileExistsError as error:
        parser.error(f"{error.filename} exists: name another folder")
    root = make_word("data.root", options.folder)
    command = shlex.join(["python", "train.py", "+experiment=image_classification_laptop", root])
    print(f"Written to {options.folder}. Next: {command}")
