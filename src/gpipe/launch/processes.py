"""The processes of a run: adopt torchrun's, start one per stage and replica, or stay in this one.

python train.py                                                   one process plays all stages
python train.py launch=process_per_stage pipeline.num_stages=4    four are started here, on this host
torchrun --nproc-per-node 4 train.py pipeline.num_stages=4        four are adopted, on one host or on many
"""

import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpipe.launch import BEGAN, collector, stops
from gpipe.launch.agent import Agent, End
from gpipe.launch.copies import start_method
from gpipe.launch.devices import is_adopted, own_cores, pin
from gpipe.launch.errors import ERROR_FILE, forget_errors, one_message
from gpipe.launch.network import choose_interface
from gpipe.launch.store import join_store

# A process waits for the others as long as the time-out, or as this many times what it took itself to come: they start
# at different speeds, the more so on a slow machine.
_START_FACTOR = 2.0
# The processes that wait for the first one give up later than it: it knows who is missing.
_FIRST_FACTOR = 1.2


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

    def share(self, name: str, value: str) -> str:
        """Return the first process's value on every process; every process calls it, once for a name."""
        return self.share_each(name, 1, lambda tell: tell(value))[0]

    def share_each(self, name: str, count: int, make: Callable[[Callable[[str], None]], Any]) -> list[str]:
        """Return so many values, which the first process makes one by one, on every process; every process calls it.

        name: of the values, never used before. make: called by the first one alone, with what it calls with each value.
        The others wait for each as long as for any message: raises DistStoreError on them where one does not come.
        """
        found: list[str] = []
        if self.mesh is None:
            make(found.append)
            return found
        store = PrefixStore(f"shared/{name}", dist.distributed_c10d._get_default_store())
        if self.is_main:
            numbers = iter(range(count))
            make(lambda value: store.set(str(next(numbers)), value))
        return [store.get(str(number)).decode() for number in range(count)]


@dataclass(frozen=True)
class Processes:
    """How many processes there are to be, and how each is set up.

    num_stages, num_replicas: K and R. num_processes: 1, or one for each `stages_per_device` stages and replica;
    torchrun's number overrules it.
    num_threads: of each process; None shares this host's cores out. device: cpu, cuda, or auto.
    timeout_seconds: after which a collective operation without an answer is given up.
    folder: for the file with an error's traceback. debug: show the traceback on the terminal too.
    pin_cores: every process, an only one too, is a new one; on a CPU it has as many cores of its own as threads.
    max_restarts: so many times all are started again after one has failed; more than 0 makes an only one a new one.
    modules: what each needs, and takes time to load: new processes are copies of one that has loaded it.
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
    max_restarts: int = 0
    modules: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Return R and how many processes a pipeline has."""
        return self.num_replicas, self.num_stages // self.stages_per_device


def run(function: Callable[..., None], processes: Processes, *args: Any) -> None:
    """Call function(place, folder, *args) in every process and return when all are done.

    `function` and `args` must be picklable where processes are started here. `folder` is the first process's. Where one
    fails, and there is no restart left, all are ended, one message is printed, the traceback is in error.txt in
    `folder`, and the exit status is 1.
    Where all raise SystemExit(75), because they were asked to stop, that is the exit status.
    """
    with stops.listening():
        if is_adopted():
            _work(function, processes, args)
            return
        stops.leave_if_asked()
        if processes.num_processes == 1 and not processes.pin_cores and not processes.max_restarts:
            with one_message(debug=processes.debug):
                forget_errors(processes.folder)
            with one_message(processes.folder, processes.debug):
                _set_threads(processes)
                function(_place_alone(processes), processes.folder, *args)
        else:
            _start(function, processes, args)


def _start(function: Callable[..., None], processes: Processes, args: tuple[Any, ...]) -> None:
    """Start the processes with torch's elastic agent, and wait; it ends all as soon as one fails."""
    error_file = processes.folder / ERROR_FILE
    collector.work()
    with tempfile.TemporaryDirectory(prefix="gpipe-") as logs, start_method(processes.modules) as method, _quiet():
        note = Path(logs) / "stop"
        stops.listen().pass_on(note)
        agent = Agent(
            _work,
            (function, processes, args, note),
            processes.num_processes,
            processes.max_restarts,
            Path(logs),
            error_file,
            partial(_announce_restart, processes.max_restarts),
            method,
        )
        try:
            end = agent.train()
        finally:
            stops.listen().pass_on(None)
    if isinstance(end, End):
        if end.exitcode != 1 or not error_file.exists():
            print(f"error: {end}.", file=sys.stderr)
        raise SystemExit(1)
    if stops.STOPPED in end.values():
        raise SystemExit(stops.STOPPED)


def _announce_restart(max_restarts: int, end: End, num_left: int) -> None:
    why = "" if end.exitcode == 1 else f"{end}; "
    count = f"{max_restarts - num_left} of launch.max_restarts={max_restarts}"
    print(f"warning: {why}all processes start again (restart {count}).", file=sys.stderr, flush=True)


def _work(
    function: Callable[..., None], processes: Processes, args: tuple[Any, ...], note: Path | None = None
) -> int | None:
    """Be one of several processes: join the group, call the function, leave the group.

    note: where the process that started this one says that it was asked to stop. Having stopped is no failure, so the
        status of that is returned to it.
    """
    # One that is a copy of another began when that was made, not when that one did.
    began = BEGAN if note is None else time.monotonic()
    listener = stops.listen()
    if note is not None:
        listener.obey(note)
    try:
        # The processes of a launcher have the same folder from the start; torchrun's composed their own configurations.
        with one_message(None if note is None else processes.folder, processes.debug):
            num_cores = len(own_cores())
            _set_threads(processes)
            place = replace(_join(processes, began), num_cores=num_cores)
            if note is None and place.is_main:
                forget_errors(processes.folder)
            folder = Path(place.share("folder", str(processes.folder)))
        with one_message(folder, processes.debug):
            function(place, folder, *args)
        if place.mesh is not None:
            dist.destroy_process_group()
    except SystemExit as end:
        if note is not None and end.code == stops.STOPPED:
            return stops.STOPPED
        _leave(end)
    return None


def _join(processes: Processes, began: float) -> Place:
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
    choose_interface()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store, rank, size = _meet(processes.timeout_seconds, began)
    timeout = timedelta(seconds=_patience(processes.timeout_seconds, began))
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Place(init_device_mesh(device_type, processes.shape, mesh_dim_names=("replica", "stage")), device_type)


def _patience(timeout_seconds: float, began: float) -> float:
    """Return for how many seconds a process waits for the others while all start; began: when it did."""
    return max(timeout_seconds, _START_FACTOR * (time.monotonic() - began))


def _meet(timeout_seconds: float, began: float) -> tuple[Store, int, int]:
    """Wait until all processes have come; return the store that they share, this one's rank, and their number.

    Raises TimeoutError where one does not come.
    """
    seconds = _patience(timeout_seconds, began)
    is_first = os.environ["RANK"] == "0"
    try:
        return join_store(timedelta(seconds=seconds if is_first else _FIRST_FACTOR * seconds))
    except dist.DistStoreError:
        raise TimeoutError(
            f"process 0 did not come within {_FIRST_FACTOR * seconds:.1f} s: see what keeps it, or raise "
            "pipeline.timeout_seconds."
        ) from None


def _place_alone(processes: Processes) -> Place:
    if processes.num_replicas > 1:
        raise ValueError(
            f"launch.num_replicas is {processes.num_replicas} in one process, expected 1: "
            f"set launch=process_per_stage, or launch.num_processes={math.prod(processes.shape)}."
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
        child.kill()  # SIGTERM is blocked there: one to the whole job must not end what loads the data of a last step
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else 1)


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
