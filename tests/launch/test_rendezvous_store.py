"""The store that processes start with: what an earlier try of them has left there is not seen."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from gpipe.launch.rendezvous import share_fresh_part

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server() -> dist.TCPStore:
    """The store of an agent, which outlives all tries."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def try_once(server: dist.TCPStore, ranks: list[int], size: int) -> list[dist.Store]:
    """Let some of the processes of a try, threads here, look for their part; each has a connection of its own."""
    stores = [dist.TCPStore("localhost", server.port, is_master=False, timeout=TIMEOUT) for _ in ranks]
    with ThreadPoolExecutor(len(ranks)) as threads:
        parts = [
            threads.submit(share_fresh_part, store, rank, size, TIMEOUT)
            for store, rank in zip(stores, ranks, strict=True)
        ]
        return [part.result() for part in parts]


def test_all_processes_share_a_part_and_find_nothing_in_it(server: dist.TCPStore) -> None:
    for number in range(5):
        parts = try_once(server, [2, 0, 1], 3)
        assert not any(part.check(["address"]) for part in parts)
        parts[number % 3].set("address", str(number))
        assert [part.get("address").decode() for part in parts] == [str(number)] * 3


def test_a_try_in_which_some_never_came_leaves_no_trace(server: dist.TCPStore) -> None:
    short = timedelta(seconds=0.3)
    for missing in ([0], [1], [0, 1]):
        for rank in missing:
            store = dist.TCPStore("localhost", server.port, is_master=False, timeout=short)
            with pytest.raises((TimeoutError, dist.DistStoreError)):
                share_fresh_part(store, rank, 3, short)
        parts = try_once(server, [0, 1, 2], 3)
        parts[0].set("address", "new")
        assert parts[2].get("address") == b"new"


def test_one_process_needs_nobody(server: dist.TCPStore) -> None:
    (part,) = try_once(server, [0], 1)
    part.set("address", "own")
    assert part.get("address") == b"own"
