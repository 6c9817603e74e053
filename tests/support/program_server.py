"""Run programs as forks of one process that has loaded their imports.

A test that starts train.py for one message would otherwise spend four of five seconds on importing torch and timm. The
processes that the program starts itself are new as usual, and import everything.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).parents[2]
_SERVE = "from tests.support.program_server import serve; serve()"


def run_program(
    program: Path | str, *arguments: str, folder: Path | None = None, warn: str = "default", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository, as `python -W <warn> <program> <arguments>` does.

    Args:
        program: a script; or the name of a module, which runs as with `python -m`.
        arguments: its arguments.
        folder: its working folder; None is this process's.
        warn: what becomes of warnings.
        variables: variables added to this process's environment.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        request = {
            "program": str(program),
            "arguments": list(arguments),
            "folder": str(folder or Path.cwd()),
            "environment": {**os.environ, "PYTHONPATH": str(_ROOT / "src"), **variables},
            "warn": warn,
            "files": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)],
        }
        status = _ask(request)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess([str(program), *arguments], status, *texts)


def serve() -> None:
    """Load what programs load, then run one fork after the other, as standard input requests."""
    load()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def load() -> None:
    """Load what programs load."""
    parts = ("data", "programs.build", "programs.outcome", "programs.sweep", "programs.train", "programs.translate")
    for name in parts:
        import_module(f"gpipe.{name}")


def become(
    program: str, arguments: list[str], folder: str, environment: dict[str, str], warn: str, files: list[str]
) -> NoReturn:
    """Turn this fork into a program that writes its output and its errors to two files."""
    status: object = 0
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        for path, number in zip(["/dev/null", *files], range(3), strict=True):
            os.dup2(os.open(path, os.O_RDWR), number)
        warnings.simplefilter(warn)
        sys.warnoptions[:] = [warn]  # inherited by the processes that it starts
        sys.argv = [program, *arguments]
        if program.endswith(".py"):
            sys.path[0] = str(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as Python itself ends a program
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def _ask(request: Mapping[str, Any]) -> int:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[str]:
    """Start the server of this process, which ends with it: its standard input closes."""
    environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}"}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
