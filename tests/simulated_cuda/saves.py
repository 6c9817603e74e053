"""A checkpoint's copy on side streams and in a thread of its own, beside a training."""

from __future__ import annotations

import copy
import gc
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file
from torch import nn

from gpipe.checkpoint.writer import Snapshot
from tests.simulated_cuda import ledger


def save(rank: int) -> dict[str, Any]:
    """Save layers of two devices twice, each time between two updates; return what the files have by name.

    "expected ..." is what they should have, computed on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = [nn.Linear(4, 4).weight.detach() for _ in range(2)]
    count = torch.cuda.device_count()
    weights = [copy.deepcopy(weight).to(f"cuda:{index % count}") for index, weight in enumerate(plain)]
    snapshot = Snapshot([1, 1])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):  # the second copy uses the first one's memory again
            for weight in [*weights, *plain]:
                weight.mul_(2)
            snapshot.take({"weights": {f"layers.{index}.weight": weight for index, weight in enumerate(weights)}})
            thread = threading.Thread(target=snapshot.copy)
            thread.start()
            thread.join()
            for weight in weights:
                weight.add_(1)
            place = Path(folder) / str(number)
            place.mkdir()
            snapshot.write(place, lambda: True)
            for path in place.iterdir():
                found |= {f"{number} {name}": values for name, values in load_file(path).items()}
            found |= {f"expected {number} layers.{i}.weight": weight.numpy().copy() for i, weight in enumerate(plain)}
            for weight in plain:
                weight.add_(1)
        found["bytes of pinned memory"] = sum(ledger.registered.values())
    del snapshot
    gc.collect()
    found["bytes that stay pinned"] = sum(ledger.registered.values())
    return found
