"""The key-value store that the processes of a job start with, fresh for each try of them."""

import secrets
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_LOOK_SECONDS = 0.02


def join_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store of this process's job, its rank, and the number of processes, as torchrun's variables say.

    Raises what torch does, or TimeoutError, where the others do not come in time.
    """
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return fresh_part(store, rank, size, timeout), rank, size


def fresh_part(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a part of a store that all processes of this try share, and no process of an earlier one has written to.

    torch's agent keeps its store over restarts. There a new process may find the address of an old one before the new
    one has written its own, and fail to connect to it. The number of restarts is no help: hosts may count differently.
    So each process asks under a name that nobody had before, and the first one answers with the name of the part.
    """
    own = secrets.token_hex(8)
    if rank != 0:
        store.set(f"asks/{rank}", own)
        part = store.get(f"answer/{own}").decode()  # waits for it
        store.set(f"{part}/{rank}", "knows")
        return PrefixStore(part, store)
    part, deadline = f"part-{own}", time.monotonic() + timeout.total_seconds()
    while unaware := [other for other in range(1, size) if not store.check([f"{part}/{other}"])]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the processes {unaware} did not come within {timeout.total_seconds():.1f} s: see what keeps them, "
                "or raise pipeline.timeout_seconds."
            )
        for other in unaware:
            if store.check([f"asks/{other}"]):  # which may be of an old process: then a new one will ask too
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", part)
        time.sleep(_LOOK_SECONDS)
    return PrefixStore(part, store)
