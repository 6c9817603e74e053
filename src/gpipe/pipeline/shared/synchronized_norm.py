"""Normalise a micro-batch by its statistics over all replicas, exactly, gradients included (section 2.2).

    forward     replica 0   count, mean, deviations --.
                replica 1   count, mean, deviations --+--> combined in rank order: the same bits on each
    backward    replica 0   sums of dy and dy * y ----.
                replica 1   sums of dy and dy * y ----+--> added up in rank order --> the gradient of the input

A recomputation exchanges nothing: it normalises by the statistics that its forward combined. So its output has the same
bits, and the exchanges follow the schedule's forwards and backwards, whose order is the same in all replicas.

Deviation: the paper normalises over replicas "if necessary" and leaves open when that is; here the setting
pipeline.synchronize_batch_norm decides, and it is off by default.

Import it only in a pipeline that synchronises: it loads torch.compile's machinery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.shared.replicas import Replicas
from gpipe.pipeline.step_end.moving_statistics import combine

_HEADER = 3  # numbers before the values of a message: which norm, whether in backward, how many values per channel
_ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd call _Normalize's backward; gets no gradient itself


_Moments: TypeAlias = tuple[Tensor, float]
"""Mean and variance, [2, channels], unbiased for one replica's part of a micro-batch and biased for the whole one; and
the number of values per channel."""


class StatisticsExchange:
    """Exchanges sums of this process's batch norms with the same batch norms in other replicas.

    All messages have the same length. Gloo would kill a process that receives a longer message than it expects, and no
    error could name the replica that ran another batch norm.

    Args:
        replicas: in a group of their own, as the averaging of gradients runs at the same time.
        layers: of this process, by index; the same in each replica, in the same order.
    """

    def __init__(self, replicas: Replicas, layers: Mapping[int, nn.Module] | nn.ModuleDict) -> None:
        named = (layer.named_modules(prefix=f"layers.{index}") for index, layer in layers.items())
        norms = {name: module for of_layer in named for name, module in of_layer if isinstance(module, MicroBatchNorm)}
        self._replicas = replicas
        self._names = list(norms)
        self._numbers = {norm: number for number, norm in enumerate(norms.values())}
        self._width = max(map(_count_channels, norms.values()), default=0)

    def among(self, layers: Mapping[int, nn.Module]) -> StatisticsExchange:
        """Return an exchange for other layers, by index, such as averages of these."""
        return StatisticsExchange(self._replicas, layers)

    def start(self) -> SynchronizedMicroBatch:
        """Return what normalises a stage's next micro-batch."""
        return SynchronizedMicroBatch(self)

    def gather(
        self, norm: MicroBatchNorm, count: float, rows: Tensor, *, backward: bool
    ) -> tuple[float, Tensor, Tensor]:
        """Return the sum of the replicas' counts, the counts [replicas], and their rows [replicas, 2, channels].

        All are float64, in the order of the replicas.

        Raises:
            ValueError: another replica runs another batch norm.
            LostPeer: in place of an error of the connections.
            PipelineError: a GPU failed or hangs, here or in another replica.
        """
        message = torch.zeros(_HEADER + 2 * self._width, dtype=torch.float64, device=rows.device)
        for position, number in enumerate((self._numbers[norm], backward, count)):
            message[position].fill_(number)  # a copy from the host would wait for the GPU
        message[_HEADER : _HEADER + rows.numel()] = rows.flatten()
        table = message.new_empty(self._replicas.count, len(message))
        with self._replicas.exchange():
            dist.all_gather(list(table.unbind()), message, group=self._replicas.group)
        self._replicas.wait_for_devices()
        headers = table[:, :_HEADER].tolist()
        self._refuse_difference(headers)
        gathered = table[:, _HEADER : _HEADER + rows.numel()].view(-1, *rows.shape)
        return sum(header[-1] for header in headers), table[:, _HEADER - 1], gathered

    def _refuse_difference(self, headers: list[list[float]]) -> None:
        first, *others = [
            f"the {'backward' if backward else 'forward'} of {self._names[int(number)]}"
            for number, backward, _ in headers
        ]
        for replica, other in enumerate(others, 1):
            if other != first:
                raise ValueError(
                    f"replica 0 runs {first} while replica {replica} runs {other}; with synchronize_batch_norm=True "
                    "all replicas must use the same batch norms in the same order: make the layers do so whatever "
                    "their input, or set synchronize_batch_norm=False"
                )


class SynchronizedMicroBatch:
    """One micro-batch in the batch norms of one stage, which keep this replica's statistics for `commit`.

    Attributes:
        anchors: further roots of the micro-batch's backward, one per normalisation. An exchange needs all replicas: a
            replica must take part even if no gradient comes back, as from a micro-batch of padding, because the outputs
            of the others depend on its input.
    """

    def __init__(self, exchange: StatisticsExchange) -> None:
        self.anchors: list[Tensor] = []
        self._exchange = exchange
        self._wholes: list[tuple[MicroBatchNorm, _Moments]] = []  # in call order
        self._position: int | None = None  # in them, in a recomputation
        self._is_backward = False

    def recompute(self) -> None:
        """Normalise from now on by the statistics that the forward combined, in the same order."""
        self._position = 0

    def repeat(self) -> None:
        """Likewise, but in any order: checkpoints inside layers recompute in backward."""
        self._is_backward = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # no graph can wait for other processes
    def forward(self, norm: MicroBatchNorm, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward of a batch norm.

        Raises:
            TypeError: its class does not normalise by F.batch_norm.
            ValueError: a channel has only one value over all replicas; the replicas run different batch norms; or the
                recomputation runs other ones than the forward.
            LostPeer: in place of an error of the connections.
        """

        def normalize(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:  # noqa: A002
            is_first = self._position is None and not self._is_backward
            whole = self._measure(norm, input) if is_first else self._repeat(norm)
            output, anchor = _Normalize.apply(  # type: ignore[no-untyped-call]
                (self._exchange, norm, whole, eps), _ANCHOR, input, weight, bias
            )
            if anchor.requires_grad and not self._is_backward:
                self.anchors.append(anchor)
            normalized: Tensor = output
            return normalized

        with _InPlaceOfBatchNorm(normalize) as replacement:
            output = norm.forward_with(norm.running_mean, norm.running_var, *args, **kwargs)
        if replacement.num_calls == 0:
            raise TypeError(
                f"{type(norm).__bases__[1].__name__} does not call torch.nn.functional.batch_norm, the only function "
                "that can be synchronised; use nn.BatchNorm in its place, or set synchronize_batch_norm=False"
            )
        return output

    def _measure(self, norm: MicroBatchNorm, input: Tensor) -> _Moments:  # noqa: A002
        statistics, count = _measure_statistics(input, _count_channels(norm))
        if norm.running_mean is not None:  # `commit` adds the other replicas' parts
            norm.__dict__["fresh"] = (*norm.fresh, statistics, count)
        mean, variance = statistics.double()
        rows = torch.stack([mean, (count - 1) * variance])
        num_values, counts, gathered = self._exchange.gather(norm, count, rows, backward=False)
        if num_values < 2:
            raise ValueError(
                "the batch norm sees one value per channel over all replicas, which has no variance; give each "
                "micro-batch more examples: lower num_microbatches, or raise the batch size"
            )
        means, within = gathered.unbind(1)
        total, mean, deviations = combine(counts[:, None].expand_as(means), means, within.sum(0))
        whole = torch.stack([mean, deviations / total]).to(statistics.dtype), num_values
        self._wholes.append((norm, whole))
        return whole

    def _repeat(self, norm: MicroBatchNorm) -> _Moments:
        if self._is_backward:
            own = [whole for found, whole in self._wholes if found is norm]
            if len(own) == 1:
                return own[0]
            raise ValueError(
                f"a batch norm inside torch.utils.checkpoint ran {len(own)} times in this forward; if replicas "
                "synchronise it, it can run only once: give each place its own, or set synchronize_batch_norm=False"
            )
        assert self._position is not None
        for found, whole in self._wholes[self._position : self._position + 1]:
            if found is norm:
                self._position += 1
                return whole
        raise ValueError(
            "the recomputation uses other batch norms than the forward did; make the layer do the same for the same "
            "input, or set rematerialize='never'"
        )


def _count_channels(norm: MicroBatchNorm) -> int:
    """Return how many channels a norm normalises; ghost batch norms have several times num_features."""
    return norm.num_features if norm.running_mean is None else norm.running_mean.numel()


@torch.no_grad()
def _measure_statistics(input: Tensor, num_channels: int) -> _Moments:  # noqa: A002
    """Return the statistics of [n, channels, ...], in float32 or wider; n may be 0; the variance of one value is 0."""
    if input.shape[1] != num_channels:
        raise ValueError(f"the input has {input.shape[1]} channels, but the batch norm has {num_channels}")
    count = input.numel() // num_channels
    dtype = torch.promote_types(input.dtype, torch.float32)
    statistics = torch.zeros(2, num_channels, dtype=dtype, device=input.device)
    if count > 0:  # a momentum of 1: the plain layer's own update writes the mean and the unbiased variance
        torch.ops.aten.batch_norm_update_stats(input, *statistics.unbind(), 1.0)
    if count == 1:
        statistics[1] = 0
    return statistics, count


class _Normalize(torch.autograd.Function):
    """Normalises by given statistics, and differentiates through them: through the inputs of all replicas.

    Autograd runs the nodes of a graph in the reverse order of their creation, even those of parallel branches. So the
    replicas' exchanges in backward have the same order, as in forward. If a stage computes on two devices, autograd may
    alternate between them in another order; `StatisticsExchange` detects that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        fixed: tuple[StatisticsExchange, MicroBatchNorm, _Moments, float],
        anchor: Tensor,  # noqa: ARG004
        input: Tensor,  # noqa: A002
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        _, _, (statistics, _), eps = fixed
        mean, variance = statistics.unbind()
        scale, shift = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        ctx.fixed = fixed
        ctx.save_for_backward(input, weight)
        return functional.batch_norm(input, mean, variance, scale, shift, False, 0.0, eps), input.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        exchange, norm, (statistics, num_values), eps = ctx.fixed
        input, weight = ctx.saved_tensors  # noqa: A001
        mean, variance = statistics.unbind()
        sums = torch.zeros_like(statistics)  # of dy * y, before weight and bias, and of dy
        if input.numel() > 0:  # in evaluation, the plain layer's gradients of weight and bias are these sums
            _, *found = torch.ops.aten.native_batch_norm_backward(
                gradient, input, None, mean, variance, None, None, False, eps, [False, True, True]
            )
            sums = torch.stack(found)
        _, _, gathered = exchange.gather(norm, input.numel() // len(mean), sums, backward=True)
        _, _, input_wanted, weight_wanted, bias_wanted = ctx.needs_input_grad
        input_gradient = None
        if input_wanted:
            inverse = (variance.double() + eps).rsqrt()
            factor = inverse if weight is None else inverse * weight.double()
            slope, shift = gathered.sum(0) / num_values * -factor
            shape = (-1, *[1] * (input.ndim - 2))
            centre, factor, slope, shift = (
                coefficient.to(mean.dtype).view(shape) for coefficient in (mean, factor, slope * inverse, shift)
            )
            input_gradient = input - centre
            torch.addcmul(shift, input_gradient, slope, out=input_gradient).addcmul_(gradient, factor)
            input_gradient = input_gradient.to(input.dtype)
        # The gradients of weight and bias are averaged over the replicas like all others.
        weight_gradient = sums[0].to(weight.dtype) if weight_wanted else None
        bias_gradient = sums[1].to(weight.dtype) if bias_wanted else None
        return None, None, input_gradient, weight_gradient, bias_gradient


class _InPlaceOfBatchNorm(TorchFunctionMode):
    """Calls `normalize` in place of F.batch_norm if the body normalises by the statistics of the input."""

    def __init__(self, normalize: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]) -> None:
        super().__init__()
        self.num_calls = 0
        self._normalize = normalize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # F.batch_norm itself hands its arguments over, in this form whatever its caller's.
        if func is not functional.batch_norm or not kwargs["training"]:
            return func(*args, **kwargs)
        self.num_calls += 1
        return self._normalize(args[0], kwargs["weight"], kwargs["bias"], kwargs["eps"])
