"""Execute the notebooks' scripts and write the notebooks, with all outputs, beside them.

    python notebooks/execute.py                                  # all
    python notebooks/execute.py notebooks/01_how_gpipe_works.py  # one

A script is the source, in jupytext's percent format; the .ipynb is there to be read. What would differ from one
execution to the next without a reason, such as times and random names, is left out.
"""

import argparse
from base64 import b64decode, b64encode
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from traitlets.config import Config

FOLDER = Path(__file__).parent
SCRIPTS = "[0-9][0-9]_*.py"
CLIENT = {"timeout": 120, "record_timing": False, "coalesce_streams": True}
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
    """Execute a script in this folder and return the notebook. Raises CellExecutionError."""
    notebook = read_script(script)
    resources = {"metadata": {"path": str(FOLDER)}}
    with TemporaryDirectory() as folder:
        # Sockets in the file system: the kernel can be reached by nobody else, and needs no free port.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(notebook, config=config, resources=resources, **CLIENT).execute()
    _shrink_pictures(notebook)
    notebook.metadata = NotebookNode(kernelspec=KERNEL)  # the kernel has added its version
    return notebook


def _shrink_pictures(notebook: NotebookNode) -> None:
    """Reduce pictures to 64 colours: a diagram looks the same and takes a third of the bytes."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                picture = Image.open(BytesIO(b64decode(output.data["image/png"]))).convert("RGB").quantize(64)
                picture.save(smaller := BytesIO(), "PNG", optimize=True)
                output.data["image/png"] = b64encode(smaller.getvalue()).decode()


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
