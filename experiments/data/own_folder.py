"""The command line of programs that write embedded data to a folder, in the layout of the user's own data."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from gpipe.config.literally import make_word


def write_folder(document: str | None, write: Callable[[Path], None], experiment: str) -> None:
    """Write to the folder that the command line names, and print the command that trains with it.

    Args:
        document: the docstring of the program.
        write: writes to a folder, and raises FileExistsError if it has data.
        experiment: trains with the data.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; it must not have data yet")
    options = parser.parse_args()
    try:
        write(options.folder)
    except FileExistsError as error:
        parser.error(f"{error.filename} exists: name another folder")
    command = shlex.join(["python", "train.py", f"+experiment={experiment}", make_word("data.root", options.folder)])
    print(f"Written to {options.folder}. Next: {command}")
