"""Batch norm under micro-batches: normalise by the micro-batch, average over the mini-batch (section 2.2).

forward of each micro-batch   normalise by its own mean and variance; keep them in `seen`
recomputation                 normalise the same way; keep nothing
end of the step               step_end/moving_statistics.py: combine `seen`, move the moving averages once
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from gpipe.pipeline._compat import AnyBatchNorm

if TYPE_CHECKING:
    from gpipe.pipeline.shared.synchronized_norm import SynchronizedMicroBatch

# _REPEAT: in the backward of a forward that kept its graph, a checkpoint inside a layer runs part of it again. It must
# save the same tensors as the forward did.
_OUTSIDE, _FORWARD, _RECOMPUTE, _REPEAT = "outside", "forward", "recompute", "repeat"
_phase = _OUTSIDE
_synchronized: SynchronizedMicroBatch | None = None  # the micro-batch whose statistics are those of all replicas
_phases: dict[int, str] = {}  # per GPU, while each has a launching thread; autograd's threads set the current GPU too


class microbatch_phase:  # noqa: N801 - a context manager, as `torch.no_grad` is
    """Make converted batch norms keep their statistics for the end of the step; in a recomputation, drop them.

    Args:
        norms: those that may run inside.
        recompute: whether the micro-batch was seen before.
        of_forward: whether the forward kept its graph, so that only checkpoints inside layers run again.
        synchronized: normalises by the statistics over all replicas; None: by those of this one.
    """

    __slots__ = ("_before", "_norms", "_phase", "_synchronized")

    def __init__(
        self,
        norms: Iterable[MicroBatchNorm],
        *,
        recompute: bool,
        synchronized: SynchronizedMicroBatch | None = None,
        of_forward: bool = False,
    ) -> None:
        self._norms = norms
        self._phase = (_REPEAT if of_forward else _RECOMPUTE) if recompute else _FORWARD
        self._synchronized = synchronized

    def __enter__(self) -> None:
        self._before = _find_phase(), _synchronized
        _set_phase(self._phase, self._synchronized)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _set_phase(*self._before)
        if kind is None and self._phase is _FORWARD:
            for norm in self._norms:
                if norm.fresh:
                    norm.__dict__.update(seen=norm.seen + norm.fresh, fresh=())


@contextmanager
def phase_per_gpu(devices: Iterable[torch.device]) -> Iterator[None]:
    """Give each GPU a phase of its own in the body, so that one thread per GPU may set it."""
    _phases.update((device.index, _OUTSIDE) for device in devices)
    try:
        yield
    finally:
        _phases.clear()


def _find_phase() -> str:
    return _phases[torch.cuda.current_device()] if _phases else _phase


def _set_phase(phase: str, synchronized: SynchronizedMicroBatch | None) -> None:
    global _phase, _synchronized
    if _phases:
        _phases[torch.cuda.current_device()] = phase
    else:
        _phase, _synchronized = phase, synchronized


def is_recomputing() -> bool:
    """Return whether a layer runs again on a micro-batch that it has already seen in this training step.

    For layers that count or remember something outside their buffers, which must happen only once.
    """
    return _find_phase() in (_RECOMPUTE, _REPEAT)


class MicroBatchNorm(AnyBatchNorm):
    """What `convert_batch_norm` adds to a batch norm.

    Outside a pipeline's training step it behaves as before. Inside, it normalises each micro-batch by its own
    statistics, or by those over all replicas, and leaves the moving averages alone. `moving_statistics.commit` moves
    them once, to what one update of the plain layer on the concatenation of all its inputs would give.
    """

    # Class attributes, so that converting an instance adds nothing to it before its first step. Between two
    # micro-batches `fresh` is empty: a compiled forward always finds the same, and is compiled once.
    # Both are flat: statistics, count, statistics, count, ... Statistics are one tensor, [mean, variance]: each object
    # that lives until the end of the step brings the next garbage collection nearer, and its pause holds up all stages.
    fresh: tuple[Any, ...] = ()  # of the micro-batch under way
    seen: tuple[Any, ...] = ()  # of the step's micro-batches before it
    is_torchs_own = False  # whether the class that was converted is one of torch's own

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - the name that torch gave it
        """Normalise; the shapes are those of the layer that was converted.

        Raises:
            ValueError: there is one value per channel to normalise, which has no variance.
        """
        # Direct access to the dictionaries: nn.Module's attribute access would cost as much as a small layer.
        buffers, parameters, attributes = self._buffers, self._parameters, self.__dict__
        running_mean, running_var = buffers["running_mean"], buffers["running_var"]
        if _synchronized is not None and self.training:
            normalized: Tensor = _synchronized.forward(self, input, *args, **kwargs)
            return normalized
        if self.training and self.is_torchs_own and input.ndim > 1 and input.numel() == input.shape[1]:
            raise ValueError(
                f"the batch norm sees one value per channel in an input of {tuple(input.shape)}, which has no "
                "variance; give each micro-batch more examples: lower num_microbatches, or raise the batch size"
            )
        phase = _find_phase()
        if phase is _OUTSIDE or not self.training or running_mean is None or running_var is None:
            unchanged: Tensor = super().forward(input, *args, **kwargs)
            return unchanged
        # With a momentum of 1 and buffers of zeros, the plain layer's own update writes the micro-batch's mean and
        # unbiased variance: no second pass over the input. A recomputation needs neither, except where there are no
        # weights: then only the buffers' type tells torch in which precision to compute.
        statistics, mean, variance = None, None, None
        weight, bias = (
            (self.weight, self.bias)  # perhaps computed
            if "parametrizations" in self._modules
            else (parameters["weight"], parameters["bias"])
        )
        if phase is not _RECOMPUTE or weight is None or not self.is_torchs_own:
            statistics = running_mean.new_zeros(2, running_mean.numel())
            mean, variance = statistics.unbind()
        if self.is_torchs_own:
            self._check_input_dim(input)  # type: ignore[no-untyped-call]
            output = functional.batch_norm(input, mean, variance, weight, bias, True, 1.0, self.eps)
        else:  # the forward of any subclass
            output = self.forward_with(mean, variance, input, *args, **kwargs)
        if phase is _FORWARD:
            attributes["fresh"] = (*self.fresh, statistics, input.numel() // running_mean.numel())
        return output

    def forward_with(self, mean: Tensor | None, variance: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the plain layer's forward with other buffers, which get the statistics of its input."""
        kept_buffers, momentum = dict(self._buffers), self.__dict__["momentum"]
        self._buffers.update(running_mean=mean, running_var=variance, num_batches_tracked=None)
        self.__dict__["momentum"] = 1.0
        try:
            output: Tensor = super().forward(*args, **kwargs)
        finally:
            self._buffers.update(kept_buffers)
            self.__dict__["momentum"] = momentum
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the plain class, which can be found by its name, and convert that again."""
        return _unpickle, (type(self).__bases__[1],), self.__dict__


def convert_batch_norm(module: nn.Module) -> nn.Module:
    """Convert every batch norm below (or at) `module`, in place; names, weights and state_dict stay the same.

    Works on nn.BatchNorm1d, 2d, 3d and on subclasses of them, such as timm's BatchNormAct2d; not on those that read
    their moving averages in training, such as batch renormalisation: within a step they would read other values.

    Returns:
        The module itself.

    Raises:
        ValueError: a batch norm is lazy and does not know its size yet.
    """
    for name, child in module.named_modules():
        if isinstance(child, AnyBatchNorm) and isinstance(child, LazyModuleMixin):
            raise ValueError(
                f"{name or 'the module'} ({type(child).__name__}) does not know its size yet; run the model on an "
                "example first, or give nn.BatchNorm its num_features"
            )
        if isinstance(child, AnyBatchNorm) and not isinstance(child, MicroBatchNorm | SyncBatchNorm):
            child.__class__ = _convert_class(type(child))
    return module


_converted_classes: dict[type[AnyBatchNorm], type[AnyBatchNorm]] = {}


def _convert_class(plain: type[AnyBatchNorm]) -> type[AnyBatchNorm]:
    if plain not in _converted_classes:
        members = {"__doc__": plain.__doc__, "is_torchs_own": plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)}
        _converted_classes[plain] = type(f"Micro{plain.__name__}", (MicroBatchNorm, plain), members)
    return _converted_classes[plain]


def _unpickle(plain: type[AnyBatchNorm]) -> AnyBatchNorm:
    converted = _convert_class(plain)
    return converted.__new__(converted)


def converted_batch_norms(modules: Iterable[nn.Module]) -> list[MicroBatchNorm]:
    """Return the converted batch norms below the modules, each once, in order."""
    found = {id(child): child for module in modules for child in module.modules() if isinstance(child, MicroBatchNorm)}
    return list(found.values())


def discard(norms: Iterable[MicroBatchNorm]) -> None:
    """Forget the statistics of an unfinished step."""
    for norm in norms:
        attributes = norm.__dict__  # nn.Module sets attributes slowly
        attributes["seen"] = attributes["fresh"] = ()
