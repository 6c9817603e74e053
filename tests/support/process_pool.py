"""Processes that stay, so that many small cases can run on several of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpipe.launch.store import LOOPBACK, serve_store
from gpipe.pipeline.layers import split_backward
from gpipe.training.numerics import set_numerics
from tests.support.program_server import start_function


class ProcessPool:
    """Processes to run functions on, in a Gloo group of as many as each call asks for.

    A function is called as function(rank, *args) and must be importable by name. One thread per process and
    deterministic kernels, as in the process of the tests, so that results can be compared bit by bit.
    """

    def __init__(self, size: int) -> None:
        self._store = serve_store(LOOPBACK)
        self._calls = 0
        key = multiprocessing.current_process().authkey.hex()  # with which processes send each other tensors
        self._pipes = [start_function(_serve, rank, self._store.port, key) for rank in range(size)]
        self._pids: list[int] = [pipe.recv() for pipe in self._pipes]

    def run(self, num_processes: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each process's call returned, by rank; fail if one of them raised."""
        self._calls += 1
        pipes = self._pipes[:num_processes]
        for pipe in pipes:
            pipe.send((self._calls, num_processes, function, args))
        answers = [pipe.recv() for pipe in pipes]
        errors = [f"rank {rank}:\n{text}" for rank, (failed, text) in enumerate(answers) if failed]
        if errors:
            raise AssertionError("\n".join(errors))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


def _serve(pipe: Connection, rank: int, port: int, key: str) -> None:
    multiprocessing.current_process().authkey = bytes.fromhex(key)
    pipe.send(os.getpid())
    gc.freeze()  # no collection need go through what is loaded
    torch.set_num_threads(1)
    split_backward.SMALL_PRODUCT = 0
    set_numerics(deterministic=True, float32_matmul_precision="highest")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            call, num_processes, function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(call), store),
                rank=rank,
                world_size=num_processes,
                timeout=timedelta(seconds=60),
            )
            # A process whose function sends nothing would leave while another is still connecting to it.
            dist.barrier()
            answer = False, function(rank, *args)
        except Exception:  # noqa: BLE001 - a test's assertion, or the error that it is about
            answer = True, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Layers that torch has sharded are cycles and hold their groups, whose threads wake a hundred times a second.
        if len(list(Path("/proc/self/task").iterdir())) > 8:
            gc.collect()
        pipe.send(answer)
