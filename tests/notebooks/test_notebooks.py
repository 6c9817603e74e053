"""A notebook is its script, executed: without errors, and with no path of the machine that did it."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import jupytext
import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
MAX_BYTES = 300_000
REMEDY = "`make notebooks` writes it from the script"
ABSOLUTE_PATH = re.compile(r"(?:(?<![\w.:/$])/[\w.-]+/|\b[A-Za-z]:\\)[\w.-]*")

each_notebook = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def read(script: Path) -> NotebookNode:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: NotebookNode) -> Iterator[str]:
    """Yield all that can be read: sources and outputs, but no pictures."""
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (text for kind, text in output.get("data", {}).items() if not kind.startswith("image/"))


def tables(notebook: NotebookNode) -> list[str]:
    """Return what the outputs write as Markdown, which follows from the records alone."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]


def test_every_notebook_has_its_script_and_a_line_in_the_readme() -> None:
    names = {script.stem for script in SCRIPTS}
    assert names == {path.stem for path in FOLDER.glob("*.ipynb")}
    assert names == set(re.findall(r"\((\d\d_\w+)\.ipynb\)", (FOLDER / "README.md").read_text("utf-8")))


@each_notebook
def test_the_notebook_has_the_cells_of_its_script(script: Path) -> None:
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    assert [(cell.cell_type, cell.source) for cell in read(script).cells] == expected, REMEDY


@each_notebook
def test_the_notebook_was_executed_from_the_top_without_errors_or_warnings(script: Path) -> None:
    cells = code_cells(read(script))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), REMEDY
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@each_notebook
def test_the_notebook_is_small_and_names_no_path_of_the_machine(script: Path) -> None:
    notebook = read(script)
    assert set(notebook.metadata) == {"kernelspec"}
    assert not [cell.metadata for cell in notebook.cells if cell.metadata or "id" in cell], REMEDY
    assert [found[0] for text in texts(notebook) for found in ABSOLUTE_PATH.finditer(text)] == []
    assert script.with_suffix(".ipynb").stat().st_size < MAX_BYTES


@each_notebook
def test_every_picture_is_an_svg_of_valid_xml(script: Path) -> None:
    pictures = [
        (kind, content)
        for cell in code_cells(read(script))
        for output in cell.outputs
        for kind, content in output.get("data", {}).items()
        if kind.startswith("image/")
    ]
    assert pictures and {kind for kind, _ in pictures} == {"image/svg+xml"}
    for _, content in pictures:
        assert ElementTree.fromstring(content).tag.endswith("svg")


def test_a_shortened_picture_has_the_same_texts_and_rounded_coordinates() -> None:
    sys.path.insert(0, str(FOLDER))
    execute = importlib.import_module("execute")
    sys.path.remove(str(FOLDER))
    text = '<text x="1.2345" style="fill: red; font-family: A">0.123 and 4.567</text>'
    picture = f'<svg>\n <!-- x -->\n <g id="text_1">\n  {text}</g></svg>'
    assert execute.shorten(picture) == "<svg><text x='1.2' style='fill: red'>0.123 and 4.567</text></svg>"


@pytest.mark.parametrize(
    ("text", "has_path"),
    [
        ("/home/me/x.py:3: UserWarning", True),
        ("File '/tmp/a/b.py'", True),
        (r"C:\Users\me", True),
        ("see src/gpipe/pipeline/schedule.py", False),
        ("$O(N + L/K \\times N/M)$ and a/b/c", False),
        ("https://arxiv.org/abs/1811.06965", False),
        (r"{N}: \text{bubble}", False),
    ],
)
def test_an_absolute_path_is_told_from_other_slashes(text: str, has_path: bool) -> None:
    assert bool(ABSOLUTE_PATH.search(text)) == has_path


@pytest.mark.slow
@each_notebook
def test_the_script_still_executes_to_what_the_notebook_says_of_the_records(script: Path, tmp_path: Path) -> None:
    # In a process of its own: the packages of Jupyter warn of each other.
    command = [sys.executable, FOLDER / "execute.py", script, "--output", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tables(read(tmp_path / script.name)) == tables(read(script)), REMEDY
