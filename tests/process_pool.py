"""Processes that stay, so that many small cases can run on several of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class ProcessPool:
    """N processes in one Gloo group; each call runs a function on all of them.

    The function is called as function(rank, *args) and must be importable by name. One thread a process, as in the
    process of the tests, so that results can be compared bit by bit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each process's call returned, by rank; raise if one of them raised."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self._pipes]
        errors = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(answers) if failed]
        if errors:
            raise AssertionError("\n".join(errors))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def stage_mesh(num_stages: int, num_replicas: int = 1) -> Any:
    """Return a mesh of replicas x stages over all processes of the group."""
    return init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((False, function(rank, *args)))
        except Exception:  # noqa: BLE001 - reported to the test
            pipe.send((True, traceback.format_exc()))
