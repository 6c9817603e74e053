"""Lay out a payload in a message: the types, shapes, strides and places of its tensors."""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpipe.pipeline.job.host_memory import allocate_on_host
from gpipe.pipeline.microbatch import Payload, PayloadError, Structure
from gpipe.pipeline.transfer import MiniBatch

_HOST = torch.device("cpu")
_ALIGNMENT = 64  # bytes, as in torch's own allocations, so that kernels compute the same on received tensors
PREFIX_BYTES = _ALIGNMENT  # of every message, before the tensors
_ZEROS = bytes(2 * _ALIGNMENT)

_Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Of a tensor: its type, shape and strides, and `TensorLayout`'s `offset`."""

_Key: TypeAlias = tuple[tuple[_Spec, ...], Structure, tuple[bool, ...], tuple[bool, ...], MiniBatch]
"""Of a payload: the specs of its tensors; its `structure`, `differentiable` and `shared`; and its mini-batch."""


class TensorLayout(NamedTuple):
    """The spec of one tensor; `strides` is None for a contiguous one.

    `offset` is where it begins after a multiple of 64 bytes, in elements: kernels add up in another order when a tensor
    is not aligned.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes travel."""
        return self.num_elements * self.dtype.itemsize

    def allocate(self, num_elements: int, device: torch.device) -> Tensor:
        """Return memory for `num_elements` elements that begins at the offset."""
        memory = torch.empty(self.offset + num_elements, dtype=self.dtype, device=device)
        return memory[self.offset :].data if self.offset else memory

    @property
    def distinct(self) -> tuple[int, ...]:
        """The shape of the elements that travel: of an expanded dimension only one."""
        if self.strides is None:
            return self.shape
        return tuple(size if stride > 0 else 1 for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_elements(self) -> int:
        """How many elements travel: for a tensor that overlaps itself, such as windows, all the memory it spans."""
        extent = 1
        for stride, size in sorted(zip(self.strides or (), self.shape, strict=False)):
            if size > 1 and stride > 0:
                if stride < extent:
                    return self.span
                extent += (size - 1) * stride
        return math.prod(self.distinct)

    @property
    def span(self) -> int:
        """How many elements the tensor spans in memory: more than travel if it has holes."""
        if self.strides is None:
            return math.prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class MessageFormat:
    """What two neighbours must agree on to exchange only a payload's bytes."""

    layouts: tuple[TensorLayout, ...]  # one per tensor
    structure: Structure  # how the tensors are nested
    differentiable: list[bool]
    shared: list[bool]
    batch: MiniBatch  # that the payload belongs to
    key: _Key | None = None  # from which the sender made it

    @classmethod
    def of(cls, payload: Payload, batch: MiniBatch, predicted: MessageFormat) -> MessageFormat:
        """Return the format in which a payload travels: the predicted object, if the payload has its key."""
        specs = [(t.dtype, t.shape, t.stride(), t.data_ptr() % _ALIGNMENT // t.itemsize) for t in payload.tensors]
        key = tuple(specs), payload.structure, tuple(payload.differentiable), tuple(payload.shared), batch
        if key == predicted.key:  # takes half as long as a look-up by hash
            return predicted
        _refuse_without_memory(payload)
        return _make_format(key)

    @functools.cached_property
    def num_bytes(self) -> int:
        """The size of a message."""
        return PREFIX_BYTES + sum(gap + layout.num_bytes for gap, layout, *_ in self._buffers)

    @functools.cached_property
    def _buffers(self) -> list[tuple[int, TensorLayout, int, Any]]:
        """For each tensor: the bytes before it, its layout, the number of its elements, and its buffer's type."""
        buffers, end = [], 0
        for layout in self.layouts:
            gap = -end % _ALIGNMENT + layout.offset * layout.dtype.itemsize
            buffers.append((gap, layout, layout.num_elements, ctypes.c_char * layout.num_bytes))
            end += gap + layout.num_bytes
        return buffers

    def lay_out(self, prefix: bytes, payload: Payload) -> list[Any]:
        """Return a message as buffers, in order; a tensor that is stored as it travels is not copied."""
        parts: list[Any] = [prefix]
        for tensor, (gap, layout, _, buffer) in zip(payload.tensors, self._buffers, strict=True):
            if gap:
                parts.append(_ZEROS[:gap])
            if layout.strides is None and not (tensor.is_conj() or tensor.is_neg()):
                parts.append(buffer.from_address(tensor.data_ptr()))
            else:
                parts.append(flatten(tensor, layout).numpy().data)
        return parts

    def allocate(self) -> tuple[list[Tensor], list[Any]]:
        """Return memory for the elements of each tensor and, with it, the buffers of a message."""
        elements, parts = [], [bytearray(PREFIX_BYTES)]
        for gap, layout, num_elements, buffer in self._buffers:
            if gap:
                parts.append(bytearray(gap))
            if layout.strides is None and not layout.offset:  # needs no view
                elements.append(allocate_on_host(layout.shape, dtype=layout.dtype))
            else:
                elements.append(layout.allocate(num_elements, _HOST))
            if num_elements:  # nothing is received into an empty buffer
                parts.append(buffer.from_address(elements[-1].data_ptr()))  # does not keep the tensor alive
        return elements, parts

    def unpack(self, message: Tensor) -> Payload:
        """Return the payload whose tensors lie in a message."""
        elements, end = [], PREFIX_BYTES
        for gap, layout, *_ in self._buffers:
            begin, end = end + gap, end + gap + layout.num_bytes
            # `.data`: autograd must not count an in-place change of one tensor as a change of all.
            elements.append(message[begin:end].view(layout.dtype).data)
        return self.payload(elements)

    def payload(self, parts: Sequence[Tensor]) -> Payload:
        """Make tensors from the elements that travelled, and nest them."""
        tensors = [reshape(part, layout) for part, layout in zip(parts, self.layouts, strict=True)]
        return Payload(tensors, self.structure, self.differentiable, self.shared)

    def to_json(self) -> bytes:
        """Return the format as JSON."""
        parts = self.layouts, self.structure, self.differentiable, self.shared, self.batch
        return json.dumps(parts, default=str, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> MessageFormat:
        """Read what `to_json` wrote."""
        rows, structure, differentiable, shared, batch = json.loads(text)
        layouts = [
            TensorLayout(getattr(torch, dtype.removeprefix("torch.")), tuple(shape), strides and tuple(strides), offset)
            for dtype, shape, strides, offset in rows
        ]
        return cls(tuple(layouts), read_structure(structure), differentiable, shared, MiniBatch(*batch))


def _refuse_without_memory(payload: Payload) -> None:
    """Refuse tensors without memory, and those whose bytes are not their values."""
    for tensor in payload.tensors:
        if tensor.is_quantized or (tensor.numel() and not tensor.data_ptr()):
            kind = "on the meta device" if tensor.is_meta else f"of the type {tensor.dtype}, {type(tensor).__name__}"
            raise PayloadError(
                f"the payload has a tensor of shape {tuple(tensor.shape)} {kind}, which has no plain values in memory; "
                "between processes only dense tensors travel: return a dense one, or keep it inside one layer"
            )


def count_bytes(tensor: Tensor) -> int:
    """Return how many bytes of a tensor travel."""
    return TensorLayout(tensor.dtype, tensor.shape, _find_strides(tensor.shape, tensor.stride())).num_bytes


def flatten(tensor: Tensor, layout: TensorLayout) -> Tensor:
    """Return a tensor's memory as bytes, in the order of its addresses; a view if possible."""
    tensor = tensor.detach()
    if layout.strides is None:
        elements = tensor.contiguous().view(-1)
    elif layout.span == layout.num_elements:
        elements = tensor.as_strided((layout.num_elements,), (1,))
    else:
        elements = tensor.as_strided(layout.distinct, layout.strides).contiguous().view(-1)
    return elements.resolve_conj().resolve_neg().view(torch.uint8)  # lazy conj and neg are applied


def reshape(elements: Tensor, layout: TensorLayout) -> Tensor:
    """Return elements with the shape and strides of a layout; a view if there are no holes."""
    if layout.strides is None:
        return elements if elements.shape == layout.shape else elements.view(layout.shape)
    if layout.span > layout.num_elements:
        memory = layout.allocate(layout.span, elements.device)
        memory.as_strided(layout.distinct, layout.strides).copy_(elements.view(layout.distinct))
        elements = memory
    return elements.as_strided(layout.shape, layout.strides)


# Packing a payload may hold up all stages after this one, so known formats are cached.
@functools.lru_cache(maxsize=1024)
def _make_format(key: _Key) -> MessageFormat:
    specs, structure, differentiable, shared, batch = key
    layouts = [
        TensorLayout(dtype, shape, _find_strides(shape, strides), offset) for dtype, shape, strides, offset in specs
    ]
    return MessageFormat(tuple(layouts), structure, list(differentiable), list(shared), batch, key)


def _find_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides with which to rebuild a tensor, None if it is contiguous.

    The next layer's kernels, and so the last bits of its result, can depend on them: a channels-last tensor must arrive
    channels-last, and likewise an expanded one, a slice with holes, and overlapping windows.
    """
    contiguous = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    return None if strides == contiguous or math.prod(shape) == 0 else strides


def read_structure(value: Any) -> Structure:
    """Rebuild a structure from JSON, which turns tuples into lists."""
    if value is None or isinstance(value, int):
        return value
    kind, children = value
    if kind == "dict":
        return kind, tuple((key, read_structure(child)) for key, child in children)
    return kind, tuple(read_structure(child) for child in children)


EMPTY = MessageFormat((), None, [], [], MiniBatch(0, 0))
"""The format of a stream before its first message."""
