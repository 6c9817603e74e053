"""Write the embedded photographs to a folder, in the layout that `data=image_folder` reads.

    python -m experiments.data.write_photographs FOLDER

FOLDER/train/<class>/<number>.png and FOLDER/val/<class>/<number>.png: 6,000 and 1,000 images of 28 x 28 pixels.
"""

from pathlib import Path

from experiments.data.own_folder import write_folder
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
    write_folder(__doc__, write_photographs, "image_classification_laptop")
