"""New processes over Gloo, each with one thread, that run a function of a study together."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from gpipe.launch.store import LOOPBACK, serve_store


def start(
    function: Callable[..., Any], num_stages: int, *arguments: Any, num_replicas: int = 1, num_jobs: int = 1
) -> Any:
    """Run a function of a mesh of replicas and stages in new processes; return what the first one returns.

    Args:
        function: takes the mesh, then `arguments`.
        num_stages: a process each.
        arguments: the function's others.
        num_replicas: of the stages.
        num_jobs: how many such meshes there are side by side.
    """
    stores = [serve_store(LOOPBACK) for _ in range(num_jobs)]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    context = torch.multiprocessing.start_processes(
        _serve,
        (function, (num_replicas, num_stages), [store.port for store in stores], arguments, results),
        num_jobs * num_replicas * num_stages,
        join=False,
        start_method="spawn",
    )
    while results.empty():
        if context.join(timeout=0.1):
            break
        time.sleep(0.1)
    found = results.get()
    while not context.join():
        pass
    return found


def _serve(
    number: int,
    function: Callable[..., Any],
    shape: tuple[int, int],
    ports: Sequence[int],
    arguments: Sequence[Any],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    num_processes = shape[0] * shape[1]
    job, rank = divmod(number, num_processes)
    store = dist.TCPStore(LOOPBACK, ports[job], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_processes)
    found = function(init_device_mesh("cpu", shape, mesh_dim_names=("replica", "stage")), *arguments)
    if number == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()
