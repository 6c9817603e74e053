"""Cut a mini-batch into micro-batches, and take apart and rebuild the nests of tensors that travel between layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

Structure: TypeAlias = int | tuple[str, tuple[Any, ...]] | None
"""A nest without its tensors: None, the position of a tensor, or a container of structures.

A container is ("tuple" | "list", children) or ("dict", ((key, child), ...)): hashable, and JSON can carry it.
"""

_ALONE: Structure = ("tuple", (0,))


class PayloadError(TypeError):
    """A value that cannot travel between layers."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """A tensor of a mini-batch whose examples are not along its first dimension."""

    tensor: Tensor
    dimension: int | None  # that of the examples; None: every micro-batch gets the whole tensor


def split_along(tensor: Tensor, dimension: int) -> Any:
    """Mark a tensor of the inputs or targets whose examples are along another dimension than the first.

    Put the result into the nest for `Pipeline.train_step` or `Pipeline.evaluate`. Layers and the loss see parts of the
    tensor itself.

    Raises:
        ValueError: the tensor has no such dimension.
    """
    if not -tensor.ndim <= dimension < tensor.ndim:
        raise ValueError(f"dimension is {dimension}, but the shape is {tuple(tensor.shape)}; give one that it has")
    return Examples(tensor, dimension % tensor.ndim)


def replicated(tensor: Tensor) -> Any:
    """Mark a tensor of the inputs or targets that belongs to no example, such as a mask or a table of positions.

    Every micro-batch gets the whole tensor. It travels from stage to stage once per micro-batch, as other tensors do.
    """
    return Examples(tensor, None)


@dataclass(slots=True)
class Payload:
    """The distinct tensors of a nest, and how they were nested.

    Attributes:
        tensors: in order of first appearance. A tensor that appears twice in the nest is one entry, so that its
            gradients are summed in one place, in the plain model's order.
        structure: where each tensor stood.
        differentiable: whether each tensor needs a gradient. The producer asks for it, the consumer computes it.
        shared: whether each tensor may share memory with another. In another process it no longer does, so a change in
            place would not reach the other tensor. Empty if none does, or before `find_shared`.
    """

    tensors: list[Tensor]
    structure: Structure
    differentiable: list[bool]
    shared: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Payload:
        """Take a nest apart.

        Raises:
            PayloadError: an entry is neither a dense tensor, None, nor a tuple, list or dict of them.
        """
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:  # as from most layers
            return cls([value], 0, [value.requires_grad])
        tensors: list[Tensor] = []
        structure = _flatten(value, tensors, {}, "the payload", None)
        return cls(tensors, structure, [tensor.requires_grad for tensor in tensors])

    @classmethod
    def of_gradients(cls, gradients: tuple[Tensor | None, ...]) -> Payload:
        """Return what `of` does, faster for a single gradient, which is all that most stages have."""
        if len(gradients) == 1 and (only := gradients[0]) is not None and only.layout is torch.strided:
            return cls([only], _ALONE, [only.requires_grad])
        return cls.of(gradients)

    @classmethod
    def of_mini_batch(cls, value: Any, what: str = "example") -> tuple[Payload, list[int | None]]:
        """Take inputs or targets apart, and find the dimension of each tensor along which its examples are."""
        tensors: list[Tensor] = []
        dimensions: list[int | None] = []
        structure = _flatten(value, tensors, {}, what, dimensions)
        return cls(tensors, structure, [tensor.requires_grad for tensor in tensors]), dimensions

    def value(self) -> Any:
        """Rebuild the nest."""
        return unflatten(self.structure, self.tensors)

    def replace(self, tensors: list[Tensor]) -> Payload:
        """Return the same payload with other tensors, such as copies on another device."""
        return Payload(tensors, self.structure, self.differentiable, self.shared)

    def differentiable_tensors(self) -> list[Tensor]:
        """Return the tensors that need a gradient."""
        return [tensor for tensor, is_wanted in zip(self.tensors, self.differentiable, strict=True) if is_wanted]

    def replace_differentiable(self, tensors: Iterable[Tensor]) -> Payload:
        """Return the same payload with other tensors in place of those that need a gradient."""
        others = iter(tensors)
        pairs = zip(self.tensors, self.differentiable, strict=True)
        return self.replace([next(others) if is_wanted else tensor for tensor, is_wanted in pairs])

    def to(self, device: torch.device) -> Payload:
        """Return the same payload on a device, without waiting for the copies."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        return self.replace([tensor.to(device, non_blocking=True) for tensor in self.tensors])

    def detach(self) -> Payload:
        """Return the same payload, detached from its graph."""
        return self.replace([tensor.detach() for tensor in self.tensors])

    def find_shared(self, before: Payload) -> None:
        """Find the tensors that share memory with each other, or with one that is shared in `before`."""
        if len(self.tensors) < 2 and not before.shared:
            return
        num = len(self.tensors)
        tensors = self.tensors + [t for t, is_shared in zip(before.tensors, before.shared, strict=False) if is_shared]
        shared = [False] * len(tensors)
        end, last = 0, 0
        for begin, position in sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors)):
            if begin < end:
                shared[position] = shared[last] = True
            if (own_end := begin + _span(tensors[position])) > end:
                end, last = own_end, position
        self.shared = shared[:num] if any(shared[:num]) else []


def read_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; in inference mode nothing counts that."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _span(tensor: Tensor) -> int:
    """Return how many bytes lie between a tensor's first element and the end of its last."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.nbytes
    return tensor.itemsize * (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a nest from its structure and its tensors."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return tensors[structure]
    kind, children = structure
    if kind == "dict":
        return {key: unflatten(child, tensors) for key, child in children}
    items = [unflatten(child, tensors) for child in children]
    return tuple(items) if kind == "tuple" else items


def _flatten(
    value: Any, tensors: list[Tensor], positions: dict[int, int], path: str, dimensions: list[int | None] | None
) -> Structure:
    """Take a nest apart; only with `dimensions`, which gets those of the examples, may it contain `Examples`."""
    dimension: int | None = 0
    if isinstance(value, Examples) and dimensions is not None:
        value, dimension = value.tensor, value.dimension
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            kind, call = ("nested", "to_padded_tensor(0)") if value.is_nested else (value.layout, "to_dense()")
            raise PayloadError(
                f"{path} is a tensor of layout {kind}; only dense tensors travel between layers: call .{call} in the "
                "layer that makes it"
            )
        # The caller's nest keeps every tensor alive meanwhile, so no id is reused.
        position = positions.setdefault(id(value), len(tensors))
        if position == len(tensors):
            tensors.append(value)
            if dimensions is not None:
                dimensions.append(dimension)
        elif dimensions is not None and dimensions[position] != dimension:
            raise ValueError(
                f"{path} appears twice, with its examples along dimension {dimensions[position]} and along "
                f"{dimension}; mark both alike"
            )
        return position
    if value is None:
        return None
    if type(value) in (tuple, list):
        children = tuple(_flatten(item, tensors, positions, f"{path}[{i}]", dimensions) for i, item in enumerate(value))
        return type(value).__name__, children
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return "dict", tuple(
            (k, _flatten(item, tensors, positions, f"{path}[{k!r}]", dimensions)) for k, item in value.items()
        )
    text, give = repr(value), "give only" if dimensions is not None else "keep it inside one layer, or return only"
    text = text if len(text) <= 40 else text[:37] + "..."
    raise PayloadError(
        f"{path} is of type {type(value).__name__} ({text}); {give} tensors, None, and tuples, lists and dicts with "
        "string keys; torch.as_tensor converts numbers and arrays, tuple a NamedTuple, dict a mapping, vars a dataclass"
    )


def microbatch_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Return the number of examples of each micro-batch: as even as possible, larger ones first, none empty.

    A mini-batch with fewer examples than micro-batches makes one micro-batch per example.

    >>> microbatch_sizes(10, 4)
    [3, 3, 2, 2]
    >>> microbatch_sizes(2, 4)
    [1, 1]
    """
    parts = min(batch_size, num_microbatches)
    small, larger = divmod(batch_size, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def find_batch_size(value: Any, what: str) -> int:
    """Return the number of examples of a nest: the length of the first dimension, or of the one that is marked.

    Raises:
        ValueError: there is no tensor, a tensor without dimensions, an empty batch, or two different lengths.
    """
    payload, dimensions = Payload.of_mini_batch(value, what)
    lengths = {
        tensor.shape[dimension] if tensor.ndim else 0
        for tensor, dimension in zip(payload.tensors, dimensions, strict=True)
        if dimension is not None
    }
    if len(lengths) != 1 or 0 in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in payload.tensors)
        raise ValueError(
            f"the {what} have {'the shapes ' + shapes if shapes else 'no tensor'}; every tensor needs the mini-batch's "
            "examples, at least one, as its first dimension; mark others with gpipe.split_along or gpipe.replicated"
        )
    return lengths.pop()


def split(value: Any, sizes: Sequence[int]) -> list[Payload]:
    """Cut every tensor of a nest along its examples; the parts share its memory, nothing is copied."""
    payload, dimensions = Payload.of_mini_batch(value)
    parts = [
        tensor.split(list(sizes), dimension) if dimension is not None else [tensor] * len(sizes)
        for tensor, dimension in zip(payload.tensors, dimensions, strict=True)
    ]
    # `.data` is detached and counts its own changes: a layer that changes one micro-batch in place must not make what
    # autograd saved of another one look changed.
    nothing = [False] * len(parts)
    # Examples may overlap in memory, as those of `expand` and `unfold` do.
    shared = [d is None or t.nbytes > _span(t) for t, d in zip(payload.tensors, dimensions, strict=True)]
    shared = shared if any(shared) else []
    return [Payload([part[i].data for part in parts], payload.structure, nothing, shared) for i in range(len(sizes))]
