"""The averaging of gradients over the replicas: started after a stage's last backward, awaited at the step's end.

    last backward of stage 1      layer 5   layer 4   layer 3   gradient to stage 0
    its buckets of gradients                                                       [5, 4, 3 -- reduced ---]
    last backward of stage 0                                                       layer 2   layer 1   layer 0
    its buckets of gradients                                                            [2, 1 -- reduced ---] [0 -- ...]
    end of the step                                                                               wait        next work

The gradient of the boundary waits neither for the averages nor for the copies into buckets: the stage before is idle
until it arrives. Torch's DistributedDataParallel waits for the averages within the backward: every earlier stage would
wait too, once per stage. Where no stage waits, buckets are reduced as soon as their gradients are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from gpipe.pipeline.checks.refusals import refuse_different, refuse_gradient_types
from gpipe.pipeline.shared.replicas import Replicas

BUCKET_BYTES = 25 * 2**20
"""Gradients travel together up to about this size, as in torch's DDP; larger ones travel alone."""

_ALIGNMENT = 512
"""In bytes: allocators align tensors to multiples of it. How a kernel adds up may depend on where a tensor begins, and
in a bucket that depends on the stage."""


class _Bucket:
    """Some gradients, one after another in one tensor, and for each whether this replica has it.

    Once all are made they are copied there, and become views of it.

    Attributes:
        missing: the parameters whose last gradient is yet to be made.
        unused: those for which this replica has no gradient, each with a flag: 0 if no replica has one.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self.missing: set[Parameter] = set()
        self._places: list[tuple[int, Sequence[int]]] = []
        size = 0
        for parameter in parameters:
            # A gradient has its parameter's strides if these leave no gaps.
            self._places.append((size, torch.empty_like(parameter, device="meta").stride()))
            size += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT // parameter.itemsize
        self._begin_of_flags, self._size = size, size + len(parameters)
        self.unused: list[tuple[Parameter, Tensor]] = []
        self._work: dist.Work | None = None

    def reduce(self, replicas: Replicas) -> None:
        """Begin to average."""
        first = self.parameters[0]
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in self.parameters):
            raise ValueError(
                "a gradient is sparse, and replicas average only dense ones; set sparse=False in its layer"
            )
        flat = torch.empty(self._size, dtype=first.dtype, device=first.device)
        flags = flat[self._begin_of_flags :].fill_(1.0 / replicas.count)
        for parameter, flag, (offset, strides) in zip(self.parameters, flags, self._places, strict=True):
            average = flat.as_strided(parameter.shape, strides, offset)
            if parameter.grad is None:
                average.zero_()
                self.unused.append((parameter, flag.zero_()))
            else:
                torch.mul(parameter.grad, 1.0 / replicas.count, out=average)
            parameter.grad = average
        self._work = dist.all_reduce(flat, group=replicas.group, async_op=True)

    def wait(self) -> None:
        """Make what comes next wait for the averages: on a CPU the host, on a GPU its current stream."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class Averaging:
    """Averages the gradients of one stage over its replicas, which freeze the same parameters.

    Every replica averages its stages in the same order, as their last backwards follow each other down the stages; and
    within a stage its buckets in order. The layers' weights and buffers become those of replica 0.

    is_awaited: whether the stage before waits for the last backward's boundary gradient.
    """

    def __init__(self, layers: Mapping[int, nn.Module], replicas: Replicas, *, is_awaited: bool = False) -> None:
        self.replicas = replicas
        self._is_awaited = is_awaited
        self._layers = layers
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Parameter, _Bucket] = {}
        self._num_reduced = 0
        self._parameters: list[Parameter] = []  # held, so that their ids are not reused
        self._bound: list[tuple[int, bool]] | None = None
        self._copy_from_first_replica()  # for uses before the first step: evaluations, and copies for averages

    def start_step(self) -> None:
        """Bind the averaging to the trainable parameters that the layers have now."""
        parameters = [parameter for layer in self._layers.values() for parameter in layer.parameters()]
        bound = [(id(parameter), parameter.requires_grad) for parameter in parameters]
        self._num_reduced = 0
        if bound == self._bound:
            return
        self._parameters, self._bound = parameters, bound
        named = [pair for i, layer in self._layers.items() for pair in layer.named_parameters(prefix=f"layers.{i}")]
        refuse_gradient_types(named, "which replicas average")
        names = [f"requires_grad of {name}" for name, _ in named]
        trained = self.replicas.gather([parameter.requires_grad for _, parameter in named])
        refuse_different([dict(zip(names, of_replica, strict=True)) for of_replica in trained], "replica {}")
        chosen = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = [_Bucket(group) for group in group_alike(reversed(chosen))]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._copy_from_first_replica()

    def _copy_from_first_replica(self) -> None:
        for state in chain.from_iterable((*layer.parameters(), *layer.buffers()) for layer in self._layers.values()):
            if state.layout is not torch.strided:
                raise ValueError(
                    f"a buffer of shape {tuple(state.shape)} has the layout {state.layout}, and replicas exchange "
                    "only dense ones; register it as a dense tensor, and make it sparse in the forward"
                )
            self.replicas.broadcast(state, 0)

    @contextmanager
    def reducing(self, awaited: Iterable[Parameter] | None = None) -> Iterator[None]:
        """Reduce buckets as they become complete in the body, a stage's last task that makes gradients of weights.

        If the stage before waits for the body, leave all to `reduce_all`.

        awaited: the parameters whose gradients the body makes, and nothing else; None: any, and the boundary's.
        """
        if awaited is None and self._is_awaited:
            yield
            return
        awaited = self._bucket_of if awaited is None else awaited
        with ExitStack() as hooks:
            for parameter in awaited:
                if (bucket := self._bucket_of.get(parameter)) is not None:
                    bucket.missing.add(parameter)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(self._note).remove)
            self._reduce_complete()
            yield

    def reduce_all(self) -> None:
        """Reduce the remaining buckets, after the last task.

        A gradient that this replica still lacks comes from other replicas, or does not exist.
        """
        for bucket in self._buckets:
            bucket.missing.clear()
        with self.replicas.waiting():
            self._reduce_complete()

    def _note(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        if parameter not in bucket.missing:
            raise RuntimeError(
                "the gradient of a parameter was made in two parts within one backward, and replicas already average "
                "the first; give torch.utils.checkpoint use_reentrant=False"
            )
        bucket.missing.remove(parameter)  # type: ignore[arg-type]
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Reduce the next buckets, as far as they are complete: all replicas reduce them in the same order."""
        while self._num_reduced < len(self._buckets) and not self._buckets[self._num_reduced].missing:
            self._buckets[self._num_reduced].reduce(self.replicas)
            self._num_reduced += 1

    def wait(self) -> None:
        """Make what comes next wait for the averages: on a CPU the host, on a GPU its current stream."""
        with self.replicas.exchange():
            for bucket in self._buckets:
                bucket.wait()

    def finish_step(self) -> None:
        """Drop gradients that no replica has; if this one lacked some, wait for the averages to tell."""
        unused = [pair for bucket in self._buckets for pair in bucket.unused]
        if not unused:
            return
        self.replicas.wait_for_devices()
        flags = torch.stack([flag.double() for _, flag in unused]).tolist()
        for (parameter, _), flag in zip(unused, flags, strict=True):
            if not flag:
                parameter.grad = None
        self.reset()

    def reset(self) -> None:
        """Forget which gradients this replica lacked; after a step that failed, none follows."""
        for bucket in self._buckets:
            bucket.unused.clear()


def group_alike(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Yield the parameters of each bucket, in order; those in a bucket have the same type and device."""
    group: list[Parameter] = []
    size = 0
    for parameter in parameters:
        is_other = group and (parameter.dtype, parameter.device) != (group[0].dtype, group[0].device)
        if group and (is_other or size + parameter.nbytes > BUCKET_BYTES):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.nbytes
    if group:
        yield group
