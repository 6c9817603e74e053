"""What a step sends and receives between processes is let go of."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import gpipe
from tests.pipeline.wire.mixed_layers import images, mean_output, stages
from tests.support.process_pool import ProcessPool

MODES = ("always", "except_last", "never")


class Track(nn.Module):
    """Keeps weak references to the memory of what a layer gets and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.sent: list[StorageWeakRef] = []
        self.received: list[StorageWeakRef] = []
        self.most_received = 0
        self.all_arrived: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.received.append(StorageWeakRef(x.untyped_storage()))
        self.most_received = max(self.most_received, alive(self.received))
        if gpipe.is_recomputing() and len(self.all_arrived) < 1 and len(self.sent) > 4:
            self.all_arrived.append(eventually_expired(self.sent[:4]))
        y = x * self.scale
        self.sent.append(StorageWeakRef(y.untyped_storage()))
        return y


def alive(references: list[StorageWeakRef]) -> int:
    return len({reference.cdata for reference in references if not reference.expired()})


def eventually_expired(references: list[StorageWeakRef]) -> bool:
    """Return whether all are let go of within some seconds: a thread waits for the arrival of what was sent."""
    for _ in range(500):
        if all(reference.expired() for reference in references):
            return True
        time.sleep(0.01)
        gc.collect()
    return False


def track_memory(rank: int, mode: str) -> tuple[list[bool], bool, bool, bool]:
    layers = nn.Sequential(Track(), Track(), Track())
    pipeline = gpipe.Pipeline(layers, mean_output, (1, 1, 1), 4, rematerialize=mode, mesh=stages(3), timeout_seconds=10)
    own: Track = layers[rank]
    inputs, targets = images(8), torch.ones(8, 3, 4, 4)
    batch = [StorageWeakRef(tensor.untyped_storage()) for tensor in (inputs, targets)]
    pipeline.train_step((inputs, targets))
    del inputs, targets
    gone = eventually_expired(own.sent), eventually_expired(own.received), eventually_expired(batch)
    pipeline.close()
    return own.all_arrived, *gone


@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_step_outlives_it(mode: str, processes: ProcessPool) -> None:
    for rank, (all_arrived, sent, received, batch) in enumerate(processes.run(3, track_memory, mode)):
        assert sent, f"rank {rank} keeps a boundary output"
        assert received, f"rank {rank} keeps a boundary input"
        assert batch, f"rank {rank} keeps the mini-batch"
        if mode == "always":
            assert all_arrived == [True], f"rank {rank} keeps outputs that have arrived while it recomputes"
