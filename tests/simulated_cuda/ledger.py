"""What the simulation found and counted."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of everything in the simulation. Nobody waits for a device while holding it.
lock = threading.RLock()

faults: list[str] = []
"""Uses of memory that no event orders, memory that is freed too early, and the like: one sentence each."""

FAULTS_FILE = "SIMULATED_CUDA_FAULTS"
"""The variable that names a file for the faults of all processes."""

counts: Counter[str] = Counter()
"""Kernels, copies, host synchronisations and NCCL operations."""

on_kernel: Callable[[Any, Any, Any, list[Any]], None] | None = None
"""What to call with each kernel: torch's operation, its arguments, and the tensors that it returns."""

on_fault: Callable[[str], None] | None = None
"""What to call with each fault."""

registered: dict[int, int] = {}
"""The bytes of host memory that was registered with CUDA, by address."""

synchronisations: Counter[str] = Counter()
"""The host synchronisations, by place."""

_MACHINERY = ("allocator", "generators", "ledger", "machine", "nccl", "streams", "tensors")
_UNINTERESTING = [
    *("/torch/", "/multiprocessing/", "/threading.py", "/contextlib.py", "/weakref.py"),
    *(f"/simulated_cuda/{name}.py" for name in _MACHINERY),
]


def complain(text: str) -> None:
    """Note a fault, once, and in the file for those of all processes of a program, if there is one."""
    with lock:
        if text in faults:
            return
        faults.append(text)
    if FAULTS_FILE in os.environ:
        with Path(os.environ[FAULTS_FILE]).open("a") as file:
            file.write(f"{text}\n")
    if on_fault is not None:
        on_fault(text)


def find_place() -> str:
    """Return where the code under test is, in this thread: a line, and the one that called it."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if name := _names[frame.f_code.co_filename]:
            found.append(f"{name}:{frame.f_lineno}")
            if len(found) == 2:
                break
        frame = frame.f_back
    return " < ".join(found) or "a thread of autograd"


class _Names(dict[str, str]):
    """The name of each file of code under test, and nothing for others: each operation asks for dozens."""

    def __missing__(self, file: str) -> str:
        is_uninteresting = file.startswith("<") or any(part in file for part in _UNINTERESTING)
        self[file] = "" if is_uninteresting else file.rsplit("/", 1)[-1]
        return self[file]


_names = _Names()


def forget() -> None:
    """Begin to count anew; the faults stay."""
    with lock:
        counts.clear()
        synchronisations.clear()
