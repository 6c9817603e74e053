"""Data parallelism: R replicas of a stage, whose gradients torch's DistributedDataParallel averages."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpipe.pipeline.messages import Messenger


class Replicas:
    """The same stage in R pipelines.

    Args:
        layers: this process's layers; their weights and buffers become those of replica 0.
        group: the processes that hold the same stage, on the backend that carries tensors.
        messenger: the same processes, for small messages.
    """

    def __init__(self, layers: nn.ModuleDict, group: dist.ProcessGroup, messenger: Messenger) -> None:
        self.group = group
        self.index = messenger.rank
        self.count = messenger.size
        self.messenger = messenger
        self._layers = layers
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
            # The engine runs the layers itself; this brings the machinery that reduces gradients, bucket by bucket,
            # while backward goes on. A parameter unused in one replica may be used in another.
            self._parallel = DistributedDataParallel(
                self._layers, process_group=self.group, broadcast_buffers=False, find_unused_parameters=True
            )

    def average_in_backward(self, outputs: list[Tensor]) -> list[Tensor]:
        """Make the next backward, the last of the step, average all gradients over the replicas.

        Args:
            outputs: the tensors from which that backward starts.

        Returns:
            Tensors from which it must start besides.
        """
        if self._parallel is None:
            return []
        extra: list[Tensor] = []
        if not outputs:
            # The reduction hangs on the hook of some parameter, and this micro-batch reaches none.
            first = next(parameter for parameter in self._layers.parameters() if parameter.requires_grad)
            extra = [first.flatten()[:1].sum() * 0.0]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            self._parallel.reducer.prepare_for_backward(outputs + extra)
        return extra

    def gather(self, value: Any) -> list[Any]:
        """Return the replicas' values, in their order, on each; values are what JSON can carry."""
        return self.messenger.gather(value)
