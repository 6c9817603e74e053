"""NCCL in software: operations run one after the other on a stream of the communicator's own; the bytes go over Gloo.

The host does not wait for them. But it needs the numbers to compute with: so it does wait, for a time that a test can
set, and then goes on with what is in the memory, while everything ordered after the operation counts as unfinished.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.simulated_cuda import ledger, streams
from tests.simulated_cuda.allocator import find_block
from tests.simulated_cuda.ledger import lock
from tests.simulated_cuda.streams import Stream
from tests.simulated_cuda.tensors import SimulatedTensor, hold

_FOREVER = timedelta(days=1)
patience_seconds = 60.0
"""How long the host waits for the numbers of an operation."""

cut_operations: set[str] = set()
"""The names of those in which nothing that this process sends arrives any more."""

timeouts_seconds: dict[str, set[float]] = {}
"""After how long NCCL itself would have ended the operations of each name."""


class Work(dist._Work):
    """An operation that was enqueued; it holds the tensors until somebody waits for it, as ProcessGroupNCCL does."""

    def __init__(self, stream: Stream, tensors: list[Tensor]) -> None:
        super().__init__()
        self._event, self._device, self._tensors = stream.record_event(), stream.device, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream of the device wait, not the host."""
        streams.current_stream(self._device).wait_event(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that is done; the current stream waits at once, and not when somebody asks for the value."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        self.wait()
        return future


class NCCL(dist.ProcessGroup):
    """A communicator, in the place of ProcessGroupNCCL."""

    class Options:
        """What new_group hands over."""

        is_high_priority_stream = False
        _timeout = _FOREVER
        global_ranks_in_group: list[int] = []
        group_name = ""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, options._timeout)
        self._gloo._set_default_timeout(_FOREVER)  # the code under test alone ends a wait
        self.timeout = options._timeout
        self._stream: Stream | None = None
        self._is_connected = False
        self._users: set[int] = set()
        self._operations: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._transport, daemon=True, name="simulated NCCL").start()

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "nccl"

    @property
    def group_name(self) -> str:  # torch's own asks a backend that it has itself
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> NCCL:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing."""

    @property
    def supports_splitting(self) -> bool:
        return True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Wait until the others are here: where no device is named, the first operation does."""
        self._gloo.barrier().wait(_FOREVER)
        self._is_connected = True

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self.exchange([dist.P2POp(dist.isend, tensor, group=self, group_peer=peer, tag=tag)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        return self.exchange([dist.P2POp(dist.irecv, tensor, group=self, group_peer=peer, tag=tag)])

    def exchange(self, operations: list[dist.P2POp]) -> Work:
        """Send and receive tensors as one operation."""
        sent = [(hold(one.tensor).clone(), one) for one in operations if one.op is dist.isend]
        received = [(torch.empty_like(hold(one.tensor)), one) for one in operations if one.op is dist.irecv]

        def transport() -> None:
            works = [self._gloo.send([part], one.group_peer, one.tag) for part, one in sent]
            works += [self._gloo.recv([part], one.group_peer, one.tag) for part, one in received]
            for work in works:
                work.wait(_FOREVER)
            for part, one in received:
                hold(one.tensor).copy_(part)

        reads, writes = ([one.tensor for _, one in part] for part in (sent, received))
        return self._enqueue("ncclGroup", reads, writes, transport, None)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        (tensor,) = tensors
        part = hold(tensor).clone()

        def transport() -> None:
            self._gloo.allreduce([part], options).wait(_FOREVER)
            hold(tensor).copy_(part)

        return self._enqueue("ncclAllReduce", [tensor], [tensor], transport, options)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Work:
        (tensor,) = tensors
        part, root = hold(tensor).clone(), options.rootRank

        def transport() -> None:
            over_gloo = dist.BroadcastOptions()
            over_gloo.rootRank, over_gloo.timeout = root, _FOREVER
            self._gloo.broadcast([part], over_gloo).wait(_FOREVER)
            hold(tensor).copy_(part)

        return self._enqueue("ncclBroadcast", [tensor], [tensor], transport, options)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> Work:
        (tensor,), (into,) = tensors, outputs
        part, found = hold(tensor).clone(), [torch.empty_like(hold(one)) for one in into]

        def transport() -> None:
            self._gloo.allgather([found], [part]).wait(_FOREVER)
            for one, other in zip(into, found, strict=True):
                hold(one).copy_(other)

        return self._enqueue("ncclAllGather", [tensor], into, transport, options)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        part, found = hold(tensor).clone(), torch.empty_like(hold(output))

        def transport() -> None:
            self._gloo._allgather_base(found, part).wait(_FOREVER)
            hold(output).copy_(found)

        return self._enqueue("ncclAllGather", [tensor], [output], transport, options)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> Work:
        part, own = hold(tensor).clone(), slice(self.rank() * output.numel(), (self.rank() + 1) * output.numel())
        is_mean = options.reduceOp == dist.ReduceOp.AVG  # which Gloo does not know

        def transport() -> None:
            self._gloo.allreduce([part], dist.AllreduceOptions()).wait(_FOREVER)
            hold(output).copy_(part[own].div_(self.size() if is_mean else 1).view_as(hold(output)))

        return self._enqueue("ncclReduceScatter", [tensor], [output], transport, options)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # their names in torch 2.11

    @property
    def num_operations(self) -> int:
        """How many there were."""
        return 0 if self._stream is None else self.find_position(self._stream.clock)

    def find_position(self, clock: streams.Clock) -> int:
        """Return how many of the operations something is ordered after."""
        return 0 if self._stream is None else clock.get(self._stream.number, 0)

    def abort(self) -> None:
        """End the operations that wait for others, as ncclCommAbort does."""
        if self._stream is not None:
            streams.end_unfinished(self._stream)

    def _enqueue(
        self, name: str, reads: list[Tensor], writes: list[Tensor], transport: Callable[[], None], options: Any
    ) -> Work:
        own_seconds = -1.0 if options is None else options.timeout.total_seconds()  # negative: the group's
        seconds = own_seconds if own_seconds >= 0 else self.timeout.total_seconds()
        timeouts_seconds.setdefault(name, set()).add(seconds)
        self._users.add(threading.get_ident())
        if not self._is_connected:
            ledger.complain(f"a communicator is made in the midst of the work: {name} at {ledger.find_place()}")
        if len(self._users) > 1 and name == "ncclGroup":  # collectives follow each other in the same order everywhere
            ledger.complain(f"two threads use one communicator: {name} at {ledger.find_place()}")
        for tensor in reads + writes:
            if not isinstance(tensor, SimulatedTensor):
                raise RuntimeError("No backend type associated with device type cpu")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        device = (reads + writes)[0].device
        with lock:
            self._stream = self._stream or Stream(device, name=f"NCCL's stream of {device}")
            streams.exchanging.add(self._stream.number)
            self._stream.wait_stream(streams.current_stream(device))
            number, place = self._stream.enqueue(), ledger.find_place()
            for tensor in reads:
                find_block(hold(tensor)).use(self._stream, number, name, place, writes=False)
            for tensor in writes:
                find_block(hold(tensor)).use(self._stream, number, name, place, writes=True)
            ledger.counts["NCCL operations"] += 1
            is_stuck = (name in cut_operations and bool(reads)) or bool(streams.find_unfinished(self._stream.clock))
            done = streams.add_unfinished(self._stream, number)

        def carry_out() -> None:
            transport()
            done.set()

        if not is_stuck:  # else it is queued behind a kernel that hangs
            self._operations.put(carry_out)
            done.wait(patience_seconds)
        return Work(self._stream, reads + writes)

    def _transport(self) -> None:
        try:
            while True:
                self._operations.get()()
        except RuntimeError:  # the other end is gone: NCCL would wait for ever
            return


def install() -> None:
    """Make such groups where torch is asked for NCCL.

    Deviation: a group of both backends, the default one of a run, is of Gloo alone: no tensors of GPUs travel in it.
    """
    init = dist.init_process_group

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> None:
        init("gloo" if backend == "cpu:gloo,cuda:nccl" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.batch_isend_irecv = lambda operations: [operations[0].group.exchange(operations)]
    distributed_c10d.is_nccl_available = lambda: True
    distributed_c10d.ProcessGroupNCCL = NCCL
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # type: ignore[assignment]
