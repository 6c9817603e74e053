"""Cut a mini-batch into micro-batches, and put their outputs together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpipe.pipeline.payload import Payload, unflatten


def microbatch_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Return the number of examples of each micro-batch: as even as possible, the larger ones first, none empty.

    A mini-batch with fewer examples than micro-batches makes as many micro-batches as it has examples.

    >>> microbatch_sizes(10, 4)
    [3, 3, 2, 2]
    >>> microbatch_sizes(2, 4)
    [1, 1]
    """
    parts = min(batch_size, num_microbatches)
    small, larger = divmod(batch_size, parts)
    return [small + 1] * larger + [small] * (parts - larger)


def batch_size_of(value: Any, what: str) -> int:
    """Return the length of the first dimension that all tensors of a nest share.

    Raises:
        ValueError: there is no tensor, a tensor without dimensions, an empty batch, or two different lengths.
    """
    tensors = Payload.of(value).tensors
    lengths = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths or 0 in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor at all"
        raise ValueError(
            f"the {what} have the shapes {shapes}; every tensor needs the examples of the mini-batch, at least one, "
            "as its first dimension"
        )
    (length,) = lengths
    assert length is not None
    return length


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut every tensor of a nest along its first dimension; the parts are views, nothing is copied."""
    payload = Payload.of(value)
    parts = [tensor.detach().split(list(sizes)) for tensor in payload.tensors]
    return [unflatten(payload.structure, [part[i] for part in parts]) for i in range(len(sizes))]


def merge(payloads: Sequence[Payload]) -> Any:
    """Put the outputs of the micro-batches of one mini-batch together, along the first dimension.

    Raises:
        ValueError: the outputs are not nested alike, or one is a scalar.
    """
    first = payloads[0]
    if any(payload.structure != first.structure for payload in payloads):
        raise ValueError("the outputs of the micro-batches are nested differently; return the same nest for each")
    if any(tensor.ndim == 0 for tensor in first.tensors):
        raise ValueError(
            "an output is a scalar, which cannot be put together over micro-batches: return one an example"
        )
    columns = zip(*(payload.tensors for payload in payloads), strict=True)
    return unflatten(first.structure, [torch.cat(column) for column in columns])
