"""What is read back is what Hydra composes, in the folder and with the environment of the program that asks."""

import os
from pathlib import Path

from tests.support.program_server import REMEMBERED, run_program

ROOT = Path(__file__).parents[2]
WORDS = ("+experiment=amoebanet_imagenet_laptop", "seed=4711")


def compose(folder: Path, *words: str, **variables: str) -> str:
    """Return the settings of a program that starts in a folder."""
    folder.mkdir()
    done = run_program(ROOT / "train.py", "--cfg", *words, *WORDS, folder=folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(str(folder), "<folder>")


def test_what_is_read_back_is_the_same_but_for_the_folder(tmp_path: Path) -> None:
    before = {*Path(os.environ[REMEMBERED]).glob("composed-*")}
    composed = compose(tmp_path / "first", "all")
    assert {*Path(os.environ[REMEMBERED]).glob("composed-*")} - before
    assert compose(tmp_path / "second", "all") == composed
    assert "cwd: <folder>" in composed and "seed: 4711" in composed


def test_interpolations_are_those_of_the_program(tmp_path: Path) -> None:
    for name in ("first", "second"):
        words = "job", "--resolve", "name=${oc.env:SOME_NAME}"
        assert compose(tmp_path / name, *words, SOME_NAME=name).startswith(f"name: {name}\n")
