"""The private interfaces of torch that start a job; they are the same in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # the stub lacks them
from torch.distributed.distributed_c10d import _get_default_store  # noqa: TID251

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


def default_store() -> Store:
    """Return the key-value store that the job was started with, which has no public name."""
    return _get_default_store()


def is_this_host(host: str) -> bool:
    """Return whether a name or an address is this host's, as torchrun decides which host serves the store."""
    # Here, because torch's rendezvous imports ours, by its entry point, which imports this module.
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname  # noqa: TID251

    return bool(_matches_machine_hostname(host))


def serve_processes_with(handler: DynamicRendezvousHandler, serve: Callable[[str, int], TCPStore]) -> None:
    """Let a rendezvous serve the store of the processes with a function of ours: torch's own listens everywhere."""
    handler._create_tcp_store_server = serve  # type: ignore[method-assign, assignment]
