"""Small programs on GPUs, each right or wrong in one thing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_cuda import ledger, streams


def read_beside(rank: int, *, waits: bool) -> None:
    """Read on one stream what another one writes."""
    written = torch.ones(4, device="cuda:0")
    side = torch.cuda.Stream(0)
    if waits:
        side.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(side):
        written.sum()
    written.record_stream(side)


def overwrite_beside(rank: int, *, waits: bool) -> None:
    """Write on one stream what another one still reads."""
    read, side = torch.ones(4, device="cuda:0"), torch.cuda.Stream(0)
    side.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(side):
        read.sum()
    if waits:
        torch.cuda.current_stream(0).wait_event(side.record_event())
    read.zero_()
    read.record_stream(side)


def let_go(rank: int, *, records: bool, waits: bool) -> None:
    """Free memory of one stream that another one may still use."""
    tensor, side = torch.ones(4, device="cuda:0"), torch.cuda.Stream(0)
    side.wait_stream(torch.cuda.current_stream(0))
    with torch.cuda.stream(side):
        tensor.sum()
    if records:
        tensor.record_stream(side)
    if waits:
        side.synchronize()
    del tensor


def read_copy(rank: int, *, waits: bool) -> list[float]:
    """Return what the host reads of a copy to pinned memory."""
    target = torch.zeros(2, pin_memory=True)
    target.copy_(torch.ones(2, device="cuda:0"), non_blocking=True)
    if waits:
        torch.cuda.current_stream(0).synchronize()
    return target.tolist()


def add_across(rank: int) -> str:
    """Add tensors of two devices."""
    try:
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    except RuntimeError as error:
        return str(error)
    return ""


def draw(rank: int) -> list[list[float]]:
    """Draw on two devices, whose generators have one seed, and on the CPU."""
    for index in range(2):
        torch.cuda.default_generators[index].manual_seed(5)
    torch.manual_seed(5)
    return [torch.rand(3, device=device).tolist() for device in ("cuda:0", "cuda:1", "cuda:0", "cpu")]


def count(rank: int) -> dict[str, int]:
    """Launch two kernels, copy there and back, and wait."""
    ledger.forget()
    (torch.ones(2).to("cuda:1") * 2 + 1).to("cuda:0", non_blocking=True).cpu()
    return dict(ledger.counts)


def hang(rank: int) -> list[bool]:
    """Return whether an event has come: before a kernel that hangs, behind it, and once that has ended."""
    before = torch.cuda.current_stream(0).record_event()
    kernel = streams.hang("cuda:0")
    tensor = torch.ones(2, device="cuda:0") + 1
    behind, beside = torch.cuda.current_stream(0).record_event(), torch.cuda.Stream(0).record_event()
    found = [before.query(), behind.query(), beside.query()]
    kernel.set()
    return [*found, behind.query(), tensor.tolist() == [2, 2]]


def fail(rank: int) -> list[str]:
    """Return what the host hears of a kernel that failed."""
    torch.ones(2, device="cuda:0")
    streams.break_device("cuda:0")
    found = []
    for ask in (torch.cuda.synchronize, torch.cuda.current_stream(0).record_event().query, torch.ones(2).cuda):
        try:
            ask()
        except RuntimeError as error:
            found.append(str(error))
    return found


def send(rank: int, *, waits: bool, connects: bool = True) -> Any:
    """Send a number from one GPU to another."""
    group = dist.new_group([0, 1], backend="nccl", device_id=torch.device("cuda", rank) if connects else None)
    tensor = torch.full((2,), float(rank), device=f"cuda:{rank}")
    operation = dist.P2POp(dist.isend if rank == 0 else dist.irecv, tensor, group=group, group_peer=1 - rank)
    (work,) = dist.batch_isend_irecv([operation])
    if waits:
        work.wait()
    return (tensor + 1).tolist()
