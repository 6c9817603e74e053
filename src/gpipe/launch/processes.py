"""The processes of a run: adopt torchrun's, start one a stage and replica, or stay in this one.

python train.py                          one process plays all stages
python train.py launch.num_processes=4   four are started here, on this host
torchrun --nproc-per-node 4 train.py     four are adopted, on one host or on many
"""

import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpipe.launch.devices import is_adopted, own_cores, pin
from gpipe.launch.errors import ERROR_FILE, one_message

_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 3  # for a process that does not end by SIGTERM


@dataclass(frozen=True)
class Place:
    """Where this process stands: `mesh` has the dimensions ("replica", "stage"), None where it plays all stages.

    num_cores: those of this host that the run has, more than this process's where it is pinned.
    """

    mesh: DeviceMesh | None
    device_type: str
    num_cores: int = field(default_factory=lambda: len(own_cores()))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks to the user and writes the run's record: the first one."""
        return self.mesh is None or dist.get_rank() == 0

    def devices(self, num_stages: int, stages_per_device: int = 1) -> list[torch.device] | None:
        """Return each stage's device where this process plays all stages; None means the one current device."""
        if self.mesh is not None:
            return None
        if self.device_type == "cpu":
            return [torch.device("cpu")] * num_stages
        num_devices = min(num_stages // stages_per_device, torch.cuda.device_count())
        return [torch.device("cuda", stage % num_devices) for stage in range(num_stages)]

    def share(self, value: str) -> str:
        """Return the first process's value, a text that is not empty, on every process; every process calls it."""
        if self.mesh is None:
            return value
        # As bytes: what carries any object unpickles it.
        size = torch.tensor(len(value.encode()))
        dist.broadcast(size, src=0)
        content = torch.frombuffer(bytearray(value.encode()[: int(size)].ljust(int(size))), dtype=torch.uint8)
        dist.broadcast(content, src=0)
        return content.numpy().tobytes().decode()


@dataclass(frozen=True)
class Processes:
    """How many processes there are to be, and how each is set up.

    num_stages, num_replicas: K and R. num_processes: 1, or one for each `stages_per_device` stages and replica;
    torchrun's number overrules it.
    num_threads: of each process; None shares this host's cores out. device: cpu, cuda, or auto.
    timeout_seconds: after which a collective operation without an answer is given up.
    folder: for the file with an error's traceback. debug: show the traceback on the terminal too.
    pin_cores: every process, an only one too, is a new one; on a CPU it has as many cores of its own as threads.
    """

    num_stages: int
    num_replicas: int
    num_processes: int
    num_threads: int | None
    device: str
    timeout_seconds: float
    folder: Path
    debug: bool = False
    stages_per_device: int = 1
    pin_cores: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Return R and how many processes a pipeline has."""
        return self.num_replicas, self.num_stages // self.stages_per_device


def run(function: Callable[..., None], processes: Processes, *args: Any) -> None:
    """Call function(place, folder, *args) in every process and return when all are done.

    `function` and `args` must be picklable where processes are started here. `folder` is the first process's. Where one
    fails, all are ended, one message is printed, the traceback is in error.txt in `folder`, and the exit status is 1.
    """
    if is_adopted():
        _work(function, processes, args)
    elif processes.num_processes == 1 and not processes.pin_cores:
        with one_message(processes.folder, processes.debug):
            _set_threads(processes)
            function(_place_alone(processes), processes.folder, *args)
    else:
        _start(function, processes, args)


def _start(function: Callable[..., None], processes: Processes, args: tuple[Any, ...]) -> None:
    """Start the processes with torch's elastic agent, and wait; it ends all as soon as one fails."""
    error_file = processes.folder / ERROR_FILE
    error_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpipe-") as logs, _quiet(), _signals_restored():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes.num_processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=_POLL_SECONDS,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **_shutdown_setting(),
        )
        try:
            elastic_launch(config, _work)(function, processes, args)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if failure.exitcode != 1 and not error_file.exists():  # otherwise it has said why
                end = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
                cause = "it was killed from outside, or ran out of memory"
                print(f"error: process {failure.pid} (rank {rank}) ended with {end}: {cause}.", file=sys.stderr)
            raise SystemExit(1) from None
        except SignalException as stop:
            print(f"error: stopped by {stop.sigval.name}", file=sys.stderr)
            raise SystemExit(128 + stop.sigval) from None


def _work(function: Callable[..., None], processes: Processes, args: tuple[Any, ...]) -> None:
    """Be one of several processes: join the group, call the function, leave the group."""
    # Ctrl-C, or the end of the parent process, ends this one even while it waits inside of torch.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with one_message(debug=processes.debug):
            num_cores = len(own_cores())
            _set_threads(processes)
            place = replace(_join(processes), num_cores=num_cores)
            # Each of torchrun's processes composed its own configuration: the first one's folder holds.
            folder = Path(place.share(str(processes.folder)))
        with one_message(folder, processes.debug):
            function(place, folder, *args)
        if place.mesh is not None:
            dist.destroy_process_group()
    except SystemExit as end:
        _leave(end)


def _join(processes: Processes) -> Place:
    """Join the process group; neighbouring ranks are neighbouring stages."""
    size, expected = int(os.environ["WORLD_SIZE"]), math.prod(processes.shape)
    if size == 1:
        return _place_alone(processes)
    if size != expected:
        raise ValueError(
            f"{size} processes were started, expected {expected} (launch.num_replicas={processes.num_replicas} x "
            f"{processes.shape[1]} for the stages), or 1: start as many."
        )
    device_type = _device_type(processes.device)
    if device_type == "cuda":
        num_local, num_gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if num_local > num_gpus:
            raise ValueError(
                f"{num_local} processes on a host with {num_gpus} GPUs, expected one a GPU: start as many, or set "
                "launch.num_processes=1, which plays several stages on one GPU."
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=processes.timeout_seconds))
    return Place(init_device_mesh(device_type, processes.shape, mesh_dim_names=("replica", "stage")), device_type)


def _place_alone(processes: Processes) -> Place:
    if processes.num_replicas > 1:
        raise ValueError(
            f"launch.num_replicas is {processes.num_replicas} in one process, expected 1: "
            f"set launch.num_processes={math.prod(processes.shape)}."
        )
    return Place(None, _device_type(processes.device))


def _set_threads(processes: Processes) -> None:
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_threads = processes.num_threads or max(1, len(own_cores()) // num_local)
    # Not beside a GPU, where the processes that decode images would have to share the one core.
    if processes.pin_cores and _device_type(processes.device) == "cpu":
        # The threads that are started from here on stay on the same cores.
        pin(num_threads, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(num_threads)


def _device_type(device: str) -> str:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError("launch.device is cuda, but torch finds no GPU here: set launch.device=cpu.")
    return "cuda" if device == "cuda" or (device == "auto" and has_cuda) else "cpu"


def _leave(end: SystemExit) -> NoReturn:
    """End this process now: threads that wait for other processes would hold up an ordinary exit."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else 1)


def _shutdown_setting() -> dict[str, Any]:
    known = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))  # torch 2.13; 2.11 has none
    return {"shutdown_timeout": _SHUTDOWN_SECONDS} if known else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's own log, which repeats a worker's error several times over."""
    loud = ("torch.distributed", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(loud)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Put back the handlers that the agent replaces, for whatever comes after it in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
