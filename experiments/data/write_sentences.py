"""Write the sentences that come with the package to a folder, in the layout that `data=text_folder` reads.

    python -m experiments.data.write_sentences FOLDER

FOLDER/train/<language>.txt and FOLDER/val/<language>.txt, one sentence per line, in 102 languages: 2.5 million
characters.
"""

from pathlib import Path

from experiments.data.own_folder import write_folder
from gpipe.data.text.multilingual_text import list_embedded_languages, read_embedded_pairs

FOLDERS = {"train": "train", "valid": "val"}


def write_sentences(folder: Path) -> None:
    """Write both splits.

    Raises:
        FileExistsError: one is there.
    """
    for split, name in FOLDERS.items():
        (folder / name).mkdir(parents=True)
        for language in list_embedded_languages(folder):
            lines = [f"{pair.source}\n" for pair in read_embedded_pairs(folder, split, language)]
            (folder / name / f"{language}.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_folder(__doc__, write_sentences, "language_model_laptop")
