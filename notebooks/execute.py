"""Execute the notebooks' scripts and write the notebooks, with all outputs, beside them.

    python notebooks/execute.py                                  # all
    python notebooks/execute.py notebooks/01_how_gpipe_works.py  # one

A script is the source, in jupytext's percent format; the .ipynb is for reading. What would differ between executions
without a reason, such as times and random names, is left out.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).parent
SCRIPTS = "[0-9][0-9]_*.py"
CLIENT = {"timeout": 120, "record_timing": False, "coalesce_streams": True}
SVG = "image/svg+xml"
_SHORTER = (
    (re.compile(r"<metadata>.*?</metadata>|<!--.*?-->", re.DOTALL), ""),
    (re.compile(r' id="(?:patch|line2d|text|axes|xtick|ytick|matplotlib\.axis|legend|figure)_\d+"'), ""),
    (re.compile(r"; stroke-linejoin: miter"), ""),
    (re.compile(r' transform="rotate\(-0 [^"]*\)"'), ""),
    (re.compile(r"; font-family: [^;\"]*"), ""),  # once for all texts, in the style
    (re.compile(r"\*{stroke-linejoin: round;"), "*{font-family: 'DejaVu Sans', Arial, sans-serif;"),
    (re.compile(r"\s*\n\s*"), " "),
    (re.compile(r"> <"), "><"),
    (re.compile(r'(<use [^>]*?) style="stroke: #000000; stroke-width: 0.8"'), r"\1"),  # a tick, as in its definition
    *[(re.compile(r"<g>((?:(?!<g|</g>).)*)</g>"), r"\1")] * 6,  # a group of nothing in common, from within
)
_TAG = re.compile(r"<[^>]+>")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?=[ \"])")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def read_script(script: Path) -> NotebookNode:
    """Read a percent script as a notebook without outputs and without metadata of its cells."""
    notebook = jupytext.read(script)
    notebook.metadata = NotebookNode(kernelspec=KERNEL)
    # Format 4.4 is the last in which cells have no names, which jupytext draws at random.
    notebook.nbformat, notebook.nbformat_minor = 4, 4
    for cell in notebook.cells:
        del cell["id"]
        cell.metadata.clear()
    return notebook


def execute(script: Path) -> NotebookNode:
    """Execute a script in this folder and return the notebook.

    Raises:
        CellExecutionError: a cell fails.
    """
    notebook = read_script(script)
    resources = {"metadata": {"path": str(FOLDER)}}
    with TemporaryDirectory() as folder:
        # Sockets in the file system: nobody else can reach the kernel, and it needs no free port.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(notebook, config=config, resources=resources, **CLIENT).execute()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if SVG in output.get("data", {}):
            output.data[SVG] = shorten(output.data[SVG])
    notebook.metadata = NotebookNode(kernelspec=KERNEL)  # the kernel has added its version
    return notebook


def shorten(picture: str) -> str:
    """Round the coordinates of an SVG to a tenth of a point, and shorten it without changing how it looks."""
    for pattern, shorter in _SHORTER:
        picture = pattern.sub(shorter, picture)
    return _TAG.sub(_shorten_tag, picture)


def _shorten_tag(tag: re.Match[str]) -> str:
    """Round the numbers of a tag, and use single quotes, which JSON does not escape."""
    return _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.1f}", tag[0]).replace('"', "'")


def write_notebooks(scripts: Iterable[Path], output: Path) -> None:
    """Execute scripts and write the notebooks into a folder."""
    for script in scripts:
        print(script.name, flush=True)
        nbformat.write(execute(script), output / f"{script.stem}.ipynb")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scripts", nargs="*", type=Path, help="default: all")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the notebooks; default: %(default)s")
    arguments = parser.parse_args()
    write_notebooks(arguments.scripts or sorted(FOLDER.glob(SCRIPTS)), arguments.output)
