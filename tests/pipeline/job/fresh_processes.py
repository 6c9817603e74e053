"""Processes for one test that kills or stops some of them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from gpipe.launch.store import LOOPBACK, serve_store


def run(
    num_processes: int, function: Callable[..., Any], *args: Any, mute: int | None = None, seconds: float = 30
) -> dict[int, Any]:
    """Call function(rank, *args) in processes of a Gloo group; return what those that answered returned.

    Ends when all have answered or died, or after some seconds; then kills what is left. mute: a rank that is to neither
    answer nor die; its answer counts, but is not waited for. The key-value store is in this process, as torchrun's is
    in its agent.
    """
    store = serve_store(LOOPBACK)
    # Forked from a server that has torch already: a new interpreter would take seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gpipe"])
    pipes: dict[int, Connection] = {}
    processes = []
    for rank in range(num_processes):
        pipes[rank], theirs = context.Pipe()
        call = (rank, num_processes, store.port, theirs, function, args)
        processes.append(context.Process(target=_call, args=call, daemon=True))
        processes[-1].start()
        theirs.close()
    try:
        return _answers(pipes, mute, time.monotonic() + seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(pipes: dict[int, Connection], mute: int | None, deadline: float) -> dict[int, Any]:
    answers = {}
    waiting = {pipe: rank for rank, pipe in pipes.items()}
    while waiting.keys() - {pipes.get(mute)} and (remaining := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), remaining):
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:  # it died
                continue
    return answers


def _call(
    rank: int, num_processes: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=30),
    )
    pipe.send(function(rank, *args))
    time.sleep(30)  # the test is over when all have answered; an early exit would be noticed by the others
    os._exit(0)
