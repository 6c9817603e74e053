"""Weights sharded over replicas: each keeps a shard of every parameter of its stage, of its gradient and its state.

Torch's fully_shard does the work, layer by layer. A layer's parameters are gathered for its forward, its recomputation
and its backward, and freed afterwards. Gradients add up in full until the last backward of a step, which averages them
over the replicas and leaves each replica its shard:

    F0 F1 F2 . R2 B2 R1 B1 R0 B0      each F, R and B gathers the weights (a collective of the replicas)
                              ^
                              averages the gradients and shards them

So all replicas must do the same tasks in the same order, and each needs the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from gpipe.pipeline._compat import surround_collectives
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.shared.replicas import Replicas


class _Use(torch.autograd.Function):
    """The identity on a layer's outputs. In a step's last backward it gives each of the layer's parameters a gradient.

    A parameter that the layer did not use gets zeros. Torch averages the parameters that have a gradient, in order:
    replicas that used different ones would average these with each other.
    """

    @staticmethod
    def forward(ctx: Any, sharding: Sharding, parameters: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sharding, ctx.num_parameters = sharding, len(parameters)
        ctx.set_materialize_grads(False)
        ctx.like = [(parameter.shape, parameter.new_empty(())) for parameter in parameters]
        return tuple(tensor.detach() for tensor in tensors[len(parameters) :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        unused: list[Tensor | None] = [None] * ctx.num_parameters
        if ctx.sharding.is_last_backward:
            unused = [like.new_zeros(shape) for shape, like in ctx.like]
        return None, None, *unused, *gradients


class Sharding:
    """Shards the weights of one stage over its replicas; replaces their averaging.

    The layers are changed in place; their weights and buffers become those of replica 0.

    Attributes:
        is_last_backward: whether the next backward is a step's last.
    """

    def __init__(self, layers: Mapping[int, nn.Module], replicas: Replicas) -> None:
        assert replicas.group is not None
        self.replicas = replicas
        self.is_last_backward = False
        self._layers: list[FSDPModule] = []
        for layer in layers.values():
            for tensor in (*layer.parameters(), *layer.buffers()):
                replicas.broadcast(tensor, 0)
            if (first := next(layer.parameters(), None)) is None:
                continue
            mesh = DeviceMesh.from_group(replicas.group, first.device.type)
            self._layers.append(fully_shard(layer, mesh=mesh, reshard_after_forward=True))
            surround_collectives(self._layers[-1], replicas.exchange)
            layer.register_forward_hook(self._use, prepend=True)  # while its parameters are gathered

    def start_step(self) -> None:
        """Let gradients add up in full."""
        self._set(is_last_backward=False)

    @contextmanager
    def reducing(self, awaited: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Average in the body, the last backward of the step.

        awaited: None: schedules that split backwards are refused.
        """
        assert awaited is None
        self._set(is_last_backward=True)
        yield

    def reduce_all(self) -> None:
        """Do nothing: the last backward averages, and returns once the averages are there; no gradient is missing."""

    wait = finish_step = reset = reduce_all

    def _set(self, *, is_last_backward: bool) -> None:
        self.is_last_backward = is_last_backward
        for layer in self._layers:
            layer.set_requires_gradient_sync(is_last_backward)

    def _use(self, layer: nn.Module, _: tuple[Any, ...], outputs: Any) -> Any:
        payload = _copy_views(Payload.of(outputs), layer)
        parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        wanted = [tensor for tensor in payload.tensors if tensor.requires_grad]
        if not torch.is_grad_enabled() or not parameters:
            return payload.value()
        if not wanted:
            raise ValueError(
                "no output of the layer needs a gradient, though it has weights to train; replicas that shard weights "
                "(shard_replicas=True) must run its backward together, for each micro-batch: let an output depend on a "
                "weight, freeze the weights, or set shard_replicas=False"
            )
        used = iter(_Use.apply(self, parameters, *parameters, *wanted))  # type: ignore[no-untyped-call]
        return payload.replace([next(used) if tensor.requires_grad else tensor for tensor in payload.tensors]).value()


def _copy_views(outputs: Payload, layer: nn.Module) -> Payload:
    """Return outputs with copies of those that view the layer's parameters, which are freed after its forward."""
    memory = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return outputs.replace(
        [tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor for tensor in outputs.tensors]
    )
