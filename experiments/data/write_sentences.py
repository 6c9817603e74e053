"""Write the sentences that come with the package to a folder, in the layout that `data=text_folder` reads.

    python -m experiments.data.write_sentences FOLDER

FOLDER/train/<language>.txt and FOLDER/val/<language>.txt, one sentence per line, in 102 languages: 2.5 million
characters.
"""

import argparse
import shlex
from pathlib import Path

from gpipe.config.literally import make_word
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; it must not have text yet")
    options = parser.parse_args()
    try:
        write_sentences(options.folder)
    except FileExistsError as error:
        parser.error(f"{error.filename} exists: name another folder")
    root = make_word("data.root", options.folder)
    command = shlex.join(["python", "train.py", "+experiment=language_model_laptop", root])
    print(f"Written to {options.folder}. Next: {command}")
