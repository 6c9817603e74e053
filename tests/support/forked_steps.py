"""Let the steps of `make gpu` be forks of it, instead of new Pythons: each would load torch and timm again."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.gpu import progress
from tests.support.forked_process import fork
from tests.support.program_server import SANITIZER, become

_start_new = progress.start


def fork_steps_from_here() -> None:
    """From now on, `make gpu` in this process forks its steps; it must have loaded what they need."""
    progress.start = _start


def _start(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> Any:
    interpreter, *others = words
    program, *arguments = others[1:] if others[0] == "-m" else others
    # Torch looks for the sanitizer while it is imported. Tests enable it in the processes in which GPUs work.
    if interpreter != sys.executable or (SANITIZER in environment and program != "pytest"):
        return _start_new(words, folder, environment, log)
    if program == "pytest":
        arguments += ["-W", "ignore:Module already imported"]  # it would have rewritten the assertions of plug-ins
    log.write_text("")
    files = ["/dev/null", str(log), str(log)]
    return fork(partial(become, program, arguments, str(folder), dict(environment), "default", files))
