"""How a payload lies in a message: which types, shapes and strides, and where."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe.pipeline.payload import Payload, Structure, structure_from_json
from gpipe.pipeline.transfer import MiniBatch

_ALIGNMENT = 64  # bytes, that of torch's own allocations, so that received tensors are computed on alike
PREFIX_BYTES = _ALIGNMENT  # of every message, before the tensors


class Layout(NamedTuple):
    """One tensor's place in memory; `strides` is None for a contiguous one."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    differentiable: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that torch knows under this name."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def num_elements(self) -> int:
        """How many elements travel: an expanded dimension travels once."""
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape)
        return math.prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride > 0)


@dataclass(frozen=True)
class MessageFormat:
    """What two neighbours must agree on to exchange a payload's bytes alone.

    Attributes:
        structure: how the tensors are nested.
        layouts: one a tensor.
        batch: the mini-batch that the payload belongs to.
    """

    structure: Structure
    layouts: tuple[Layout, ...]
    batch: MiniBatch

    @classmethod
    def of(cls, payload: Payload, batch: MiniBatch) -> MessageFormat:
        """Return the format in which a payload travels."""
        layouts = (
            Layout(str(t.dtype).removeprefix("torch."), tuple(t.shape), _strides(t), differentiable)
            for t, differentiable in zip(payload.tensors, payload.differentiable, strict=True)
        )
        return cls(payload.structure, tuple(layouts), batch)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor's bytes begin in a message, and where the message ends."""
        offsets = [PREFIX_BYTES]
        for layout in self.layouts:
            length = layout.num_elements * layout.torch_dtype.itemsize
            offsets.append(offsets[-1] + math.ceil(length / _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    def pack(self, payload: Payload, message: Tensor) -> None:
        """Copy the tensors' bytes behind the prefix of a message, uint8 [offsets[-1]]."""
        for tensor, layout, offset in zip(payload.tensors, self.layouts, self.offsets[:-1], strict=True):
            part = flat(tensor, layout)
            message[offset : offset + part.numel()].copy_(part)

    def unpack(self, message: Tensor) -> Payload:
        """Return the payload whose tensors are views into a message."""
        tensors = []
        for layout, offset in zip(self.layouts, self.offsets[:-1], strict=True):
            length = layout.num_elements * layout.torch_dtype.itemsize
            part = message[offset : offset + length].view(layout.torch_dtype)
            tensors.append(part.view(layout.shape) if layout.strides is None else shaped(part, layout))
        return self.payload(tensors)

    def empty(self, device: torch.device) -> Payload:
        """Return a payload of tensors to receive into, each with memory of its own."""
        tensors = []
        for layout in self.layouts:
            part = torch.empty(layout.num_elements, dtype=layout.torch_dtype, device=device)
            tensors.append(part.view(layout.shape) if layout.strides is None else shaped(part, layout))
        return self.payload(tensors)

    def payload(self, tensors: list[Tensor]) -> Payload:
        """Nest tensors as this format says."""
        return Payload(tensors, self.structure, [layout.differentiable for layout in self.layouts])

    def to_json(self) -> bytes:
        """Return the format as JSON."""
        return json.dumps([self.structure, self.layouts, self.batch], separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> MessageFormat:
        """Read what `to_json` wrote."""
        structure, layouts, batch = json.loads(text)
        return cls(
            structure_from_json(structure),
            tuple(Layout(d, tuple(shape), strides and tuple(strides), w) for d, shape, strides, w in layouts),
            MiniBatch(*batch),
        )


def flat(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a tensor's memory as bytes, in the order in which it lies there; a view where that is possible."""
    tensor = tensor.detach()
    if layout.strides is None:
        return tensor.contiguous().view(-1).view(torch.uint8)
    return tensor.as_strided((layout.num_elements,), (1,)).view(torch.uint8)


def shaped(elements: Tensor, layout: Layout) -> Tensor:
    """Return a run of elements under the shape and strides of a layout."""
    assert layout.strides is not None
    return elements.as_strided(layout.shape, layout.strides)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides to rebuild a tensor with, None for those of a contiguous one.

    The next layer's kernels, and so the last bits of its result, can depend on them: a channels-last tensor must arrive
    as one, an expanded one too.
    """
    strides = tuple(tensor.stride())
    contiguous = tuple(math.prod(tensor.shape[d + 1 :]) for d in range(tensor.ndim))
    if strides == contiguous or tensor.numel() == 0:
        return None
    expected = 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if size > 1 and stride > 0:
            if stride != expected:
                return None  # holes or overlaps: a contiguous copy travels
            expected *= size
    return strides


NOTHING = MessageFormat(None, (), MiniBatch(0, 0))
"""The format of a stream before its first message."""
