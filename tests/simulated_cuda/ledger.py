"""What the simulation found and counted."""

from __future__ import annotations

import sys
import threading
from collections import Counter

# Of everything in the simulation. Nobody waits for a device while holding it.
lock = threading.RLock()

faults: list[str] = []
"""Uses of memory that no event orders, memory that is freed too early, and the like: one sentence each."""

counts: Counter[str] = Counter()
"""Kernels, copies, host synchronisations and NCCL operations."""

synchronisations: Counter[str] = Counter()
"""The host synchronisations, by place."""

_MACHINERY = ("allocator", "generators", "ledger", "machine", "nccl", "streams", "tensors")
_UNINTERESTING = [
    *("/torch/", "/multiprocessing/", "/threading.py", "/contextlib.py", "/weakref.py"),
    *(f"/simulated_cuda/{name}.py" for name in _MACHINERY),
]


def complain(text: str) -> None:
    """Note a fault, once."""
    with lock:
        if text not in faults:
            faults.append(text)


def find_place() -> str:
    """Return where the code under test is, in this thread: a line, and the one that called it."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 2:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(part in file for part in _UNINTERESTING):
            found.append(f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "a thread of autograd"


def forget() -> None:
    """Begin to count anew; the faults stay."""
    with lock:
        counts.clear()
        synchronisations.clear()
