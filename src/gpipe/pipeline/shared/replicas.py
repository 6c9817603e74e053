"""Data parallelism: the processes that hold the same stages in R pipelines, and the averaging of their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpipe.pipeline._compat import reduce_in_backward
from gpipe.pipeline.job.errors import LostPeer, PipelineError
from gpipe.pipeline.job.messages import Messenger
from gpipe.pipeline.job.watch import PROBE_TAG, Watch


class Replicas:
    """The only replica of a pipeline: whatever it gathers is one value.

    Attributes:
        index: of this replica.
        count: R.
        group: connects the replicas, on the backend that carries tensors; None where there is one replica.
    """

    index, count = 0, 1
    group: dist.ProcessGroup | None = None

    def gather(self, value: Any) -> list[Any]:
        """Return the replicas' values, in their order, on each; values are of JSON's types."""
        return [value]

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Let the other replicas be waited for while the body runs.

        Raises:
            LostPeer: in place of an error of the connections; any other error is left as it is.
        """
        yield


class ReplicaGroup(Replicas):
    """This process and those that hold the same stages in the other pipelines; `messenger` connects the same ones."""

    def __init__(self, group: dist.ProcessGroup, messenger: Messenger, watch: Watch) -> None:
        self.group: dist.ProcessGroup = group
        self.index, self.count = messenger.rank, messenger.size
        self._messenger, self._watch = messenger, watch
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]

    def gather(self, value: Any) -> list[Any]:
        """Return the replicas' values, in their order, on each; values are of JSON's types."""
        return self._messenger.gather(value)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Let the other replicas be waited for while the body runs."""
        try:
            with self._watch.waiting_for(self._others):
                yield
        except RuntimeError as error:
            if isinstance(error, PipelineError | LostPeer) or not self._is_broken(error):
                raise
            raise LostPeer(self._others, str(error)) from None

    def _is_broken(self, error: RuntimeError) -> bool:
        """Return whether a connection to another replica is gone; torch has no class for such an error of Gloo's."""
        if isinstance(error, dist.DistBackendError):
            return True
        try:
            for peer in range(self.count):
                if peer != self.index and dist.get_backend(self.group) == "gloo":
                    self.group.send([torch.empty(1)], peer, PROBE_TAG)
        except RuntimeError:
            return True
        return False


class _Reduced(nn.Module):
    """The layers, and two numbers for the sake of the reduction.

    Attributes:
        trigger: takes part in every last backward. That may reach no parameter of the layers, and some gradient must
            start the reduction.
        idle: takes part in none. Where no parameter is idle, torch prints a warning that nobody can filter.
    """

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        like = next(parameter for parameter in layers.parameters() if parameter.requires_grad)
        self.layers = layers
        self.trigger = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))
        self.idle = nn.Parameter(self.trigger.detach().clone())


class _Touch(torch.autograd.Function):
    """A number whose backward reaches parameters and gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return trigger * 0.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * 0.0, *[None] * ctx.num_parameters


class Averaging:
    """Averages the gradients of one stage over its replicas, in the last backward of a step, with torch's DDP.

    Every replica averages its stages in the same order, for their last backwards follow each other down the stages. The
    layers' weights and buffers become those of replica 0.
    """

    def __init__(self, layers: Mapping[int, nn.Module], replicas: Replicas) -> None:
        self.replicas = replicas
        self._layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self._parallel: DistributedDataParallel | None = None
        self._trainable: list[bool] = []

    def start_step(self) -> None:
        """Bind the averaging to the parameters that are trainable now."""
        trainable = [parameter.requires_grad for parameter in self._layers.parameters()]
        if trainable == self._trainable:
            return
        self._trainable = trainable
        self._parallel = None  # lets go of the hooks of the one before
        if any(trainable):
            # The engine runs the layers itself; DDP only reduces gradients, bucket by bucket, while backward goes on.
            # A parameter that is unused in one replica may be used in another.
            with self.replicas.exchange(), warnings.catch_warnings():
                # torch 2.13 has a new name for it, which torch 2.11 does not know.
                warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
                self._parallel = DistributedDataParallel(
                    _Reduced(self._layers),
                    process_group=self.replicas.group,
                    broadcast_buffers=False,
                    find_unused_parameters=True,
                )

    def prepare_backward(self, outputs: list[Tensor]) -> list[Tensor]:
        """Make the next backward, the last of the step, average all gradients over the replicas.

        Args:
            outputs: the tensors from which that backward starts.

        Returns:
            Further tensors from which it must start.
        """
        if self._parallel is None:
            return []
        extra = [self._parallel.module.trigger * 0.0]
        reduce_in_backward(self._parallel, outputs + extra)
        return extra

    def average(self) -> None:
        """Average all gradients that are there over the replicas, after a step's last task of a split backward.

        The two parts of the last backward cannot do it on their way: which gradients either of them makes may differ
        from replica to replica, and so would the order of the exchanges.
        """
        if self._parallel is None:
            return
        made = [parameter for parameter in self._layers.parameters() if parameter.grad is not None]
        outputs = [_Touch.apply(self._parallel.module.trigger, *made)]  # type: ignore[no-untyped-call]
        reduce_in_backward(self._parallel, outputs)
        with self.replicas.exchange():
            torch.autograd.backward(outputs)
