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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gpipe._compat.torch_launch import default_store
from gpipe.launch import BEGAN, garbage_collection, stops
from gpipe.launch.agent import Agent, choose_start_method, describe_end
from gpipe.launch.devices import count_threads, is_adopted, own_cores, pin
from gpipe.launch.errors import ERROR_FILE, report_errors
from gpipe.launch.rendezvous import choose_interface, join_store
from gpipe.launch.scratch import scratch_folder

# A process waits for the others for the time-out, or for this many times its own start-up time, whichever is longer:
# processes start at different speeds, above all on a slow machine.
_START_FACTOR = 2.0


@dataclass(frozen=True)
class Place:
    """Which stages of which replica this process runs, and on which device.

    Attributes:
        mesh: the job's mesh with the dimensions ("replica", "stage"); None if this process plays all stages.
        device_type: cpu or cuda.
        num_cores: the cores of this host that the run may use; a pinned process has fewer.
    """

    mesh: DeviceMesh | None
    device_type: str
    num_cores: int = field(default_factory=lambda: len(own_cores()))

    @property
    def is_main(self) -> bool:
        """Whether this is the first process, which prints messages and writes the run's record."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return 0 if self.mesh is None else dist.get_rank()

    def devices(self, placement: Sequence[int]) -> list[torch.device] | None:
        """Return each stage's device if this process plays all stages; None if it runs on its current device.

        placement: which of the schedule's devices has each stage; fewer GPUs take several of these devices in turn.
        """
        if self.mesh is not None:
            return None
        if self.device_type == "cpu":
            return [torch.device("cpu")] * len(placement)
        return [torch.device("cuda", device % torch.cuda.device_count()) for device in placement]

    def share(self, name: str, value: str) -> str:
        """Return the first process's value on every process; every process calls it, once per name."""
        return self.share_each(name, 1, lambda tell: tell(value))[0]

    def heed_stop(self, moment: str) -> None:
        """Exit with status 75 if any process is asked to stop; every process calls it, once per moment of the start.

        What follows takes seconds, which would be wasted.
        """
        asked = [stops.find_reason() or ""]
        if self.mesh is not None:
            store = PrefixStore(f"stop when {moment}", default_store())
            store.set(str(self.rank), asked[0])
            asked = [store.get(str(rank)).decode() for rank in range(dist.get_world_size())]
        stops.exit_before_start(next(filter(None, asked), None), speaks=self.is_main)

    def share_each(self, name: str, count: int, make: Callable[[Callable[[str], None]], Any]) -> list[str]:
        """Return `count` values, which the first process makes one by one, on every process; every process calls it.

        `make` is called on the first process only, and calls its argument with each value; `name` is new. On the other
        processes, DistStoreError is raised if a value does not arrive within the time-out.
        """
        found: list[str] = []
        if self.mesh is None:
            make(found.append)
            return found
        store = PrefixStore(f"shared/{name}", default_store())
        if self.is_main:
            numbers = iter(range(count))
            make(lambda value: store.set(str(next(numbers)), value))
        return [store.get(str(number)).decode() for number in range(count)]


@dataclass(frozen=True)
class Processes:
    """How many processes a run has, and how each is set up.

    Attributes:
        num_stages, num_replicas: K and R.
        num_processes: 1, or one per `stages_per_device` stages and replica; torchrun's number takes precedence.
        num_threads: threads per process; None divides this host's cores among its processes.
        device: cpu, cuda or auto.
        timeout_seconds: how long to wait for the other processes in a collective operation.
        folder: gets the file with an error's traceback.
        debug: print the traceback on the terminal too.
        stages_per_device: how many stages each process runs.
        pin_cores: on a CPU, give each process its own cores, one per thread; a single process runs as a child.
        max_restarts: restarts allowed after a failure; with more than 0, a single process runs as a child.
        modules: modules that take long to load: new processes are forked from one that has loaded them.
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
        """The number of replicas, and of processes per pipeline."""
        return self.num_replicas, self.num_stages // self.stages_per_device


def run(function: Callable[..., None], processes: Processes, *args: Any) -> None:
    """Call function(place, folder, *args) in every process and return when all are done.

    `folder` is the first process's. If a process fails and no restart is left, all processes end, one message is
    printed, and error.txt in `folder` has the traceback. `function` and `args` must be picklable if processes are
    started here.

    Raises:
        SystemExit: with status 1 after a failure; with status 75 if all processes raised that, asked to stop.
    """
    with stops.listening():
        with report_errors(debug=processes.debug):
            scratch_folder()
        if is_adopted():
            _work(function, processes, args)
            return
        stops.exit_before_start(stops.find_reason())
        if processes.num_processes == 1 and not processes.pin_cores and not processes.max_restarts:
            with report_errors(debug=processes.debug):
                (processes.folder / ERROR_FILE).unlink(missing_ok=True)  # of an earlier try: it would silence this one
            with report_errors(processes.folder, processes.debug):
                _set_threads(processes)
                function(_make_single_place(processes), processes.folder, *args)
        else:
            _start(function, processes, args)


def _start(function: Callable[..., None], processes: Processes, args: tuple[Any, ...]) -> None:
    """Start the processes with torch's elastic agent, which ends all as soon as one fails, and wait for them."""
    error_file = processes.folder / ERROR_FILE
    garbage_collection.resume()
    with (
        tempfile.TemporaryDirectory(dir=scratch_folder()) as logs,
        choose_start_method(processes.modules) as method,
    ):
        note = Path(logs) / "stop"
        stops.listen().forward_to(note)
        everything = function, processes, args, note
        agent = Agent(
            _work, everything, processes.num_processes, processes.max_restarts, Path(logs), error_file, method
        )
        logged = logging.root.manager.disable
        logging.disable()  # the agent repeats a process's error several times
        try:
            end = agent.train()
        finally:
            logging.disable(logged)
            stops.listen().forward_to(None)
        # If nothing can be written to the run's folder, the processes leave a mark among the temporary files.
        is_told = error_file.exists() or any(Path(logs).rglob(ERROR_FILE))
    if isinstance(end, ProcessFailure):
        if end.exitcode != 1 or not is_told:
            print(f"error: {describe_end(end)}.", file=sys.stderr)
        raise SystemExit(1)
    if stops.STOPPED in end.values():
        raise SystemExit(stops.STOPPED)


def _work(
    function: Callable[..., None], processes: Processes, args: tuple[Any, ...], note: Path | None = None
) -> int | None:
    """Join the group, call the function and leave the group, in one of several processes.

    `note` is the file to which the process that started this one forwards requests to stop; None for torchrun's. The
    result is the exit status 75 if this process stopped on request, which is not a failure; else None.
    """
    # A forked process began when it was forked.
    began = BEGAN if note is None else time.monotonic()
    listener = stops.listen()
    if note is not None:
        listener.follow(note)
    try:
        # Processes started here know the folder from the start; torchrun's have composed their own settings.
        with report_errors(None if note is None else processes.folder, processes.debug):
            num_cores = len(own_cores())
            _set_threads(processes)
            place = replace(_join(processes, began), num_cores=num_cores)
            place.heed_stop("joined")
            if note is None and place.is_main:
                (processes.folder / ERROR_FILE).unlink(missing_ok=True)
            folder = Path(place.share("folder", str(processes.folder)))
        with report_errors(folder, processes.debug):
            function(place, folder, *args)
        if place.mesh is not None:
            dist.destroy_process_group()
    except SystemExit as end:
        if note is not None and end.code == stops.STOPPED:
            return stops.STOPPED
        _exit_now(end)
    return None


def _join(processes: Processes, began: float) -> Place:
    """Join the process group; neighbouring ranks are neighbouring stages."""
    size, expected = int(os.environ["WORLD_SIZE"]), math.prod(processes.shape)
    if size == 1:
        return _make_single_place(processes)
    if size != expected:
        raise ValueError(
            f"{size} processes were started, expected {expected} (launch.num_replicas={processes.num_replicas} x "
            f"{processes.shape[1]} for the stages), or 1: start that many."
        )
    device_type = _device_type(processes.device)
    if device_type == "cuda":
        num_local, num_gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if num_local > num_gpus:
            raise ValueError(
                f"{num_local} processes on a host with {num_gpus} GPUs, expected one per GPU: start fewer there, or "
                "set launch.num_processes=1, which plays several stages on one GPU."
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    choose_interface()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    store, rank, size = join_store(_compute_patience(processes.timeout_seconds, began))
    timeout = timedelta(seconds=_compute_patience(processes.timeout_seconds, began))
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Place(init_device_mesh(device_type, processes.shape, mesh_dim_names=("replica", "stage")), device_type)


def _compute_patience(timeout_seconds: float, began: float) -> float:
    """Return the seconds that a process that began at `began` waits for the others while all start."""
    return max(timeout_seconds, _START_FACTOR * (time.monotonic() - began))


def _make_single_place(processes: Processes) -> Place:
    if processes.num_replicas > 1:
        raise ValueError(
            f"launch.num_replicas is {processes.num_replicas} in one process, expected 1: "
            f"set launch=process_per_stage, or launch.num_processes={math.prod(processes.shape)}."
        )
    return Place(None, _device_type(processes.device))


def _set_threads(processes: Processes) -> None:
    num_threads = count_threads(processes.num_threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # Not with a GPU, where the processes that decode images would have to share one core.
    if processes.pin_cores and _device_type(processes.device) == "cpu":
        # Threads that start from here on stay on the same cores.
        pin(num_threads, int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(num_threads)


def _device_type(device: str) -> str:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError("launch.device is cuda, but torch finds no GPU here: set launch.device=cpu.")
    return "cuda" if device == "cuda" or (device == "auto" and has_cuda) else "cpu"


def _exit_now(end: SystemExit) -> NoReturn:
    """Exit now: threads that wait for other processes would delay an ordinary exit."""
    for child in multiprocessing.active_children():
        child.kill()  # not by SIGTERM, which is blocked there: the job's data loaders serve the last step
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else 1)
