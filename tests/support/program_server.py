"""Run programs, and functions of tests, as forks of one process that has loaded their imports.

A test that starts train.py for one message would otherwise spend four of five seconds on importing torch and timm. The
processes that the program starts itself, and those of torchrun, are forks too. All processes of a test run, pytest's
workers and whatever they start, share that process: the first one that needs it starts it, and it ends with the last
one. Each has a fork of it to itself, which forks programs as that process asks.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import import_module
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from tests.support.forked_server import fork_server_from_here

_ROOT = Path(__file__).parents[2]
SIMULATED_GPUS = _ROOT / "tests" / "simulated_cuda" / "everywhere"
"""The folder that gives a Python simulated GPUs where PYTHONPATH names it first."""
REMEMBERED = "GPIPE_TEST_REMEMBERED"
"""The variable that names the folder of what all processes of the tests share, if there is one."""
SANITIZER = "TORCH_CUDA_SANITIZER"
"""The variable that lets torch watch the streams of a process, if it is there while torch is imported."""
TORCHRUN = "torch.distributed.run"
"""The name of torchrun's module."""
MAKE_GPU = "experiments.gpu"
"""The name of the module behind `make gpu`."""
_NETWORK = 0x40000000  # Linux: CLONE_NEWNET
_TEMPORARY_FOLDER = tempfile.gettempdir()  # before a test names another, which the server would leave something in
_READY = b"."  # what a fork of the server greets with
_LOOK_SECONDS = 0.2  # between two looks at whether anybody is left
_started: list[subprocess.Popen[bytes]] = []  # they end by themselves, which may be after this process


def run_program(
    program: Path | str,
    *arguments: str,
    folder: Path | None = None,
    warn: str = "default",
    gpus: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository, as `python -W <warn> <program> <arguments>` does.

    Args:
        program: a script; or the name of a module, which runs as with `python -m`.
        arguments: its arguments.
        folder: its working folder; None is this process's.
        warn: what becomes of warnings.
        gpus: whether it has simulated GPUs.
        variables: variables added to this process's environment.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        request = {
            "program": str(program),
            "arguments": list(arguments),
            "folder": str(folder or Path.cwd()),
            "environment": _environment(variables, gpus),
            "warn": warn,
            "files": ["/dev/null", *(f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors))],
        }
        status = _ask({"run": request}, gpus=gpus)
        assert status is not None
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess([str(program), *arguments], status, *texts)


class Program:
    """A program of this repository that runs, in a session of its own, so that whatever it leaves can be found.

    Args:
        program: a script; or the name of a module, which runs as with `python -m`.
        arguments: its arguments.
        folder: its working folder.
        output: the file that its output and its errors go to.
        typed: the file that it reads what is typed from.
        ignored: signals that it ignores when it starts, as under nohup.
        finalizes: whether its end is Python's, which takes half a second; else it only flushes what it has written.
        network: the name of the network namespace that it starts in, for root alone; None is this process's.
        preloaded: a library whose functions stand before those of all others, as LD_PRELOAD has it.
        gpus: whether it has simulated GPUs.
        variables: variables added to this process's environment; None takes one away.

    Attributes:
        pid: of its process.
    """

    def __init__(
        self,
        program: Path | str,
        *arguments: str,
        folder: Path,
        output: Path,
        typed: Path = Path("/dev/null"),
        ignored: Collection[signal.Signals] = (),
        finalizes: bool = False,
        network: str | None = None,
        preloaded: Path | None = None,
        gpus: bool = False,
        **variables: str | None,
    ) -> None:
        request = {
            "program": str(program),
            "arguments": arguments,
            "folder": str(folder),
            "environment": _environment(variables, gpus),
            "warn": "default",
            "files": [str(typed), str(output), str(output)],
            "ignored": list(ignored),
            "finalizes": finalizes,
        }
        self._server = preloaded, gpus
        self.pid = _ask({"start": request, "network": network}, *self._server)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        if self._status is None:
            self._status = _ask({"poll": self.pid}, *self._server)
        return self._status

    def wait(self, seconds: float) -> int:
        """Return its exit status, once it has ended."""
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, "it does not end"
            time.sleep(0.02)
        return status


def start_function(function: Callable[..., object], *args: object, gpus: bool = False) -> Connection:
    """Start function(connection, *args) in a process of its own, and return the other end of the connection.

    The function must be importable by name, and the arguments must be JSON. The process ends with the function.
    """
    connected = _connect(None, gpus)
    request = {"module": function.__module__, "name": function.__qualname__, "arguments": args}
    connected.sendall((json.dumps({"function": request, "environment": _environment({}, gpus)}) + "\n").encode())
    assert connected.recv(1) == _READY  # only then may what it did not ask for follow
    return Connection(connected.detach())


def serve(number: int) -> None:
    """Load what programs load, then fork for each process that connects to the socket of a number, until all are gone.

    Whoever connects in the moment of the end is not greeted, and starts another server.
    """
    load()
    listener = socket.socket(fileno=number)
    listener.settimeout(_LOOK_SECONDS)
    num_served = 0
    while num_served == 0 or _has_children():
        try:
            connected, _ = listener.accept()
        except TimeoutError:
            continue
        num_served += 1
        if os.fork() == 0:
            listener.close()
            for standard in (0, 1):
                os.dup2(connected.fileno(), standard)
            connected.close()
            os.write(1, _READY)
            _answer_requests()
        connected.close()


def _has_children() -> bool:
    """Return whether a fork of this process still runs."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _answer_requests() -> NoReturn:
    """Do what the process at standard input asks for, until it is gone."""
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if "function" in request:
                _call(**request)
            print(json.dumps(_do(**request)), flush=True)
    finally:
        os._exit(0)


def _call(function: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    """Be the process of a function."""
    try:
        os.environ.clear()
        os.environ.update(environment)
        connection = Connection(os.dup(0))
        nothing = os.open(os.devnull, os.O_RDWR)
        os.write(1, _READY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        getattr(import_module(function["module"]), function["name"])(connection, *function["arguments"])
    except BaseException:  # noqa: BLE001 - as Python itself ends a program
        traceback.print_exc()
    finally:
        os._exit(0)


def _do(
    run: dict[str, Any] | None = None,
    start: dict[str, Any] | None = None,
    poll: int | None = None,
    network: str | None = None,
) -> int | None:
    """Run a program and return its exit status; or start one and return its process; or ask after the status."""
    if poll is not None:
        ended, status = os.waitpid(poll, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    child = os.fork()
    if child == 0:
        if start is not None:
            os.setsid()
        if network is not None:
            _enter(network)
        become(**(run or start or {}))
    return child if run is None else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _enter(network: str) -> None:
    """Move this process, which has no threads, into a network namespace."""
    with Path("/run/netns", network).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"the network namespace {network} cannot be entered")


def load() -> None:
    """Load what programs load, and what they all do first: learn the settings and their grammar, describe a layer."""
    parts = ("data", "programs.build", "programs.outcome", "programs.sweep", "programs.train", "programs.translate")
    later = ("programs.automatic", "launch.terminal")  # and others that a run comes to load
    others = ("matplotlib.figure", "matplotlib.backends.backend_agg", "rich._emoji_codes", "encodings.idna")
    of_wandb = "wandb.sdk.launch", "requests"  # which it loads when a run begins
    gc.set_threshold(50_000, 20, 20)  # as for the tests themselves
    for name in (*(f"gpipe.{part}" for part in (*parts, *later)), *others, *of_wandb):
        import_module(name)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.plugins import Plugins
    from omegaconf import base
    from torch import backends, cuda, empty, nn

    from gpipe.config import register_schemas
    from gpipe.planning.profile import analyze_layers
    from gpipe.records import package_versions
    from tests.support.remembered_profiles import remember_profiles
    from tests.support.remembered_settings import remember_settings

    remember_settings()
    Plugins.instance()
    register_schemas()
    OverridesParser.create().parse_overrides(["group=choice", "group.key=1"])
    for text in re.findall(r"\S*\$\{\S*", (_ROOT / "conf" / "train.yaml").read_text()):
        base.parse(text)
    package_versions()
    if not (backends.cuda.is_built() or cuda.is_available()):  # else the first backward starts a thread per device
        analyze_layers(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()), empty(2, 3, 4, 4))
    if (folder := os.environ.get(REMEMBERED)) is not None:
        remember_profiles(Path(folder))
    gc.freeze()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, "what has threads cannot be forked"


def become(
    program: str,
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    warn: str,
    files: list[str],
    *,
    ignored: Collection[int] = (),
    finalizes: bool = False,
) -> NoReturn:
    """Turn this fork into a program whose input, output and errors are three files."""
    status: object = 0
    try:
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # of the environment before
        if finalizes:
            _leave_temporary_folders()
        os.chdir(folder)
        for path, number in zip(files, range(3), strict=True):
            os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # as Python does when it starts
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        warnings.simplefilter(warn)
        sys.warnoptions[:] = [warn]  # inherited by the processes that it starts
        fork_server_from_here()
        if program == TORCHRUN:
            from tests.support.forked_workers import fork_workers_from_here

            fork_workers_from_here()
        if program == MAKE_GPU:
            from tests.support.forked_steps import fork_steps_from_here

            fork_steps_from_here()
        sys.argv = [program, *arguments]
        if program.endswith(".py"):
            sys.path[0] = str(Path(program).parent)
            main = sys.modules["__main__"] = ModuleType("__main__")  # it lives until the end, as in a new Python
            main.__file__ = program
            exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)
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
        if not finalizes:
            os._exit(status if isinstance(status, int) else 1)
    raise SystemExit(status)


def _leave_temporary_folders() -> None:
    """Leave those that modules have made when they were loaded, such as wandb's, to the process that loaded them."""
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        owner = finalizer.peek()[0]
        if isinstance(owner, tempfile.TemporaryDirectory):
            finalizer.atexit = False
            atexit.unregister(owner.cleanup)


def _environment(variables: Mapping[str, str | None], gpus: bool) -> dict[str, str]:
    paths = [SIMULATED_GPUS, _ROOT / "src", _ROOT] if gpus else [_ROOT / "src"]
    every = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **variables}
    every.pop("WANDB_SERVICE", None)  # of a test in this process: each program starts its own
    return {name: value for name, value in every.items() if value is not None}


def _ask(request: Mapping[str, Any], preloaded: Path | None = None, gpus: bool = False) -> Any:
    server = _server(preloaded, gpus)
    server.write(json.dumps(request) + "\n")
    server.flush()
    return json.loads(server.readline())


@cache
def _server(preloaded: Path | None, gpus: bool) -> TextIO:
    """Return what this process asks its fork of the server by, which ends with it: the connection closes."""
    return _connect(preloaded, gpus).makefile("rw")


def _connect(preloaded: Path | None, gpus: bool) -> socket.socket:
    """Connect to the server of this test run, which the first one to connect starts."""
    name = f"{'gpus' if gpus else 'programs'}-{'' if preloaded is None else sha256(bytes(preloaded)).hexdigest()[:8]}"
    folder = Path(os.environ.get(REMEMBERED) or _own_folder().name)
    address = "\0" + sha256(bytes(folder / name)).hexdigest()  # Linux: of no file, so nothing is left
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for attempt in ("there", "started"):
            if attempt == "started":
                _start(address, preloaded, gpus)
            connected = socket.socket(socket.AF_UNIX)
            with suppress(ConnectionError):
                connected.connect(address)
                if connected.recv(1) == _READY:
                    return connected
            connected.close()
    raise RuntimeError("the server of programs has not started")


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder of this process, for what runs without pytest."""
    return tempfile.TemporaryDirectory()


def _start(address: str, preloaded: Path | None, gpus: bool) -> None:
    """Start the server, which listens at an address from now on, and answers as soon as it has loaded."""
    paths = [*([SIMULATED_GPUS] if gpus else []), _ROOT, _ROOT / "src"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment["TMPDIR"] = _TEMPORARY_FOLDER
    environment.pop(SANITIZER, None)  # only who asks for it may have it, and it starts CUDA, which forks must not find
    if preloaded is not None:
        environment["LD_PRELOAD"] = str(preloaded)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        words = [sys.executable, "-c", f"from tests.support.program_server import serve; serve({number})"]
        _started.append(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, pass_fds=[number]))
