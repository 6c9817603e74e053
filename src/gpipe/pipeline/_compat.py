"""The private interfaces of torch that the engine calls; they are the same in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel


def open_store() -> Store:
    """Return the job's key-value store, with keys of its own for each pipeline that the job makes.

    Torch offers the store that a job was started with under a private name only; a second one would need a port.
    """
    store = _get_default_store()
    number = store.add(f"gpipe/pipelines of {dist.get_rank()}", 1)  # all processes make them in the same order
    return PrefixStore(f"gpipe/{number}", store)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the time-out of a group that exists, for which torch has no public function.

    A group is made with a short time-out, so that a process that never comes is noticed, and used with a long one.
    """
    _set_pg_timeout(timeout, group)


def reduce_in_backward(parallel: DistributedDataParallel, outputs: list[Tensor]) -> None:
    """Make the next backward, from `outputs`, average gradients; publicly, DDP does so only in a forward of its own."""
    parallel.reducer.prepare_for_backward(outputs)


@contextmanager
def noting_compilation(note: Callable[[bool], None]) -> Iterator[None]:
    """Call `note(True)` where torch.compile begins to compile in the body, and `note(False)` where it has finished.

    A layer's backward is compiled together with its forward, not within the first backward. Only torch's own tools are
    told of the one, and have the other as a setting.
    """
    from torch._dynamo.callback import CallbackArgs, callback_handler  # loads torch.compile's machinery
    from torch._functorch import config

    def begin(_: CallbackArgs) -> None:
        note(True)

    def end(_: CallbackArgs) -> None:
        note(False)

    with config.patch(force_non_lazy_backward_lowering=True):
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
