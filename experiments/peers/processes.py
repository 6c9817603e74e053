"""New processes, each on its own core or GPU, in which engines are measured."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from experiments.peers.engines import Place
from experiments.peers.workloads import SCALES, Workload
from gpipe.launch.store import LOOPBACK, serve_store

METHOD = "forkserver"  # fresh processes that need not import torch again


class Cell(NamedTuple):
    """One setting in which the engines are compared."""

    scale: str
    workload: str
    partitions: tuple[int, ...]
    num_microbatches: int
    device: str

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.partitions)

    @property
    def model(self) -> Workload:
        """What is trained."""
        return SCALES[self.scale][self.workload]

    @property
    def num_processes(self) -> int:
        """One process per stage, or one for all stages if they share a GPU."""
        return self.num_stages if self.device == "cpu" or self.num_stages <= torch.cuda.device_count() else 1


def run(function: Callable[..., Any], cell: Any, num_processes: int, *args: Any, device: str = "cpu") -> Any:
    """Run a function of a setting, which has `num_stages`, in new processes; return the result of the first one."""
    store = serve_store(LOOPBACK)
    context = torch.multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["gpipe.models", "torch.distributed.pipelining", "torchgpipe"])
    results = context.SimpleQueue()
    torch.multiprocessing.start_processes(
        _serve, (num_processes, store.port, results, device, function, cell, args), num_processes, start_method=METHOD
    )
    return results.get()


def _serve(
    rank: int,
    num_processes: int,
    port: int,
    results: Any,
    device: str,
    function: Callable[..., Any],
    cell: Any,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank]})  # before any thread starts, so that all threads stay there
        devices = [torch.device("cpu")] * cell.num_stages
    else:
        devices = [torch.device("cuda", k % torch.cuda.device_count()) for k in range(cell.num_stages)]
        torch.cuda.set_device(devices[rank])
        backend = "cpu:gloo,cuda:nccl"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_processes)
    mesh = None
    if num_processes > 1:
        mesh = init_device_mesh(device, (1, num_processes), mesh_dim_names=("replica", "stage"))
    found = function(cell, Place(rank, num_processes, devices, mesh), *args)
    if rank == 0:
        results.put(found)
    dist.barrier(make_host_group())
    dist.destroy_process_group()


def fence(place: Place) -> None:
    """Wait until all devices and processes are done."""
    for device in set(place.devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if place.num_processes > 1:
        dist.barrier(make_host_group())


_group: Any = None


def make_host_group() -> Any:
    """Return the group whose barrier does not occupy a GPU."""
    global _group
    _group = _group or dist.new_group(backend="gloo")
    return _group
