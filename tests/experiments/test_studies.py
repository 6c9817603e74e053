"""Every study starts: `python -m experiments.<study> --help`."""

from pathlib import Path

import pytest

from tests.support.program_server import run_program

FOLDER = Path(__file__).parents[2] / "experiments"
STUDIES = [
    *(path.stem for path in sorted(FOLDER.glob("[a-z]*.py"))),
    *(path.parent.name for path in sorted(FOLDER.glob("*/__main__.py"))),
    *(f"data.{path.stem}" for path in sorted((FOLDER / "data").glob("make_*.py"))),
]


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_prints_its_help(study: str) -> None:
    done = run_program(f"experiments.{study}", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr
