"""What two processes of one host send each other goes over sockets, as over Gloo between two hosts."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.pipeline.wire.local import LocalReceiver, LocalSender
from gpipe.pipeline.wire.streams import Receiver, Sender
from tests.pipeline.wire.mixed_layers import mean_output, mixed_layers, stages
from tests.pipeline.wire.test_transfer import exchange_every_kind, make_calls, train_many
from tests.support.hosts import host_of_its_own
from tests.support.process_pool import ProcessPool


def run_apart(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    with host_of_its_own():
        return function(rank, *arguments)


def name_ends(rank: int) -> list[type]:
    pipeline = gpipe.Pipeline(mixed_layers(), mean_output, (3, 3), 2, mesh=stages(2), timeout_seconds=10)
    transfer = pipeline.job.transfer
    ends = [*transfer._senders.values(), *transfer._receivers.values()]
    pipeline.close()
    return [type(end) for end in ends]


def find_other_host(rank: int, folder: str) -> list[type]:
    """Return the ends where one process alone finds no folder, and the other has one with too long a name."""
    before, tempfile.tempdir = tempfile.tempdir, folder if rank else "/nowhere"
    try:
        return name_ends(rank)
    finally:
        tempfile.tempdir = before


def test_a_connection_is_local_where_both_find_it(tmp_path: Path, processes: ProcessPool) -> None:
    assert processes.run(2, name_ends) == [[LocalSender, LocalReceiver]] * 2
    assert processes.run(2, run_apart, name_ends) == [[Sender, Receiver]] * 2
    (folder := tmp_path / ("long" * 30)).mkdir()
    assert processes.run(2, find_other_host, str(folder)) == [[Sender, Receiver]] * 2
    assert list(folder.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("num_processes", "function", "arguments"),
    [
        (2, exchange_every_kind, ("always",)),
        (2, train_many, ()),
        (3, make_calls, ((2, 1, 3), "except_last")),
        (2, make_calls, ((1, 1, 1, 3), "never", "zb_v", 2)),
    ],
)
def test_between_hosts_everything_is_as_on_one(
    num_processes: int, function: Callable[..., Any], arguments: tuple[Any, ...], processes: ProcessPool
) -> None:
    found = processes.run(num_processes, function, *arguments)
    np.testing.assert_equal(processes.run(num_processes, run_apart, function, *arguments), found)


def gather_long_texts(rank: int) -> list[str]:
    pipeline = gpipe.Pipeline(mixed_layers(), mean_output, (2, 2, 2), 2, mesh=stages(3), timeout_seconds=10)
    found = [pipeline.job.gather(f"{rank}" * 500_000) for _ in range(2)]
    told = pipeline.job.gather(rank)
    pipeline.close()
    return [*(text[:1] + text[-1:] + str(len(text)) for text in found[1]), *map(str, told)]


def test_what_processes_tell_each_other_may_be_longer_than_any_message(processes: ProcessPool) -> None:
    expected = [["00500000", "11500000", "22500000", "0", "1", "2"]] * 3
    assert processes.run(3, gather_long_texts) == expected
    assert processes.run(3, run_apart, gather_long_texts) == expected


class Large(nn.Module):
    """Multiplies by a weight; a payload of 8 MB is more than any socket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def cross(rank: int) -> tuple[float, list[float], int]:
    """Train with two streams of large payloads at once; also return the threads that were started for them."""
    before = threading.active_count()
    layers = nn.Sequential(*(Large() for _ in range(4)))
    pipeline = gpipe.Pipeline(
        layers, mean_of, [1] * 4, 8, schedule="interleaved_1f1b", stages_per_device=2, rematerialize="never",
        mesh=stages(2), timeout_seconds=20,
    )  # fmt: skip
    inputs = torch.arange(8.0)[:, None].expand(8, 2 * 2**20)
    report = pipeline.train_step((inputs, torch.zeros(8)))
    threads = threading.active_count() - before
    pipeline.close()
    assert threading.active_count() == before
    return report.loss, [float(p.grad) for p in pipeline.parameters() if p.grad is not None], threads


def mean_of(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.mean()


def test_a_stage_does_not_wait_for_its_neighbour_to_read(processes: ProcessPool) -> None:
    for loss, gradients, threads in processes.run(2, cross):
        assert loss == pytest.approx(3.5) and gradients == pytest.approx([3.5, 3.5])
        assert threads <= 5, "three links send, and the watch has two threads"


class Many(nn.Module):
    """Returns its input in many parts, some of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[Tensor]:
        return list((x * self.weight).split([1, 0, 2] * (x.shape[1] // 3), dim=1))


class Joined(nn.Module):
    """Puts the parts together."""

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)


def send_many_parts(rank: int) -> list[float]:
    pipeline = gpipe.Pipeline(
        nn.Sequential(Many(), Joined()), F.mse_loss, [1, 1], 3, mesh=stages(2), timeout_seconds=20
    )
    inputs = torch.arange(5400.0).reshape(6, 900)
    losses = [pipeline.train_step((inputs, inputs + step)).loss for step in range(3)]
    outputs = pipeline.evaluate(inputs)
    assert outputs is None or torch.equal(outputs, inputs)
    pipeline.close()
    return losses


def test_a_payload_may_have_more_parts_than_a_call_of_the_system_takes(processes: ProcessPool) -> None:
    assert processes.run(2, send_many_parts) == [[0.0, 1.0, 4.0]] * 2
