"""The outputs of a mini-batch, put together from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpipe.pipeline.microbatch import Payload, unflatten


def merge(payloads: Sequence[Payload], sizes: Sequence[int], dimension: int = 0) -> Any:
    """Concatenate the outputs of the micro-batches of one mini-batch, of given sizes, along the examples' dimension.

    Raises:
        ValueError: the outputs are not nested alike, one lacks the dimension, or of several one is not as long there as
            its micro-batch has examples.
    """
    first = payloads[0]
    if any(payload.structure != first.structure for payload in payloads):
        raise ValueError("the outputs of the micro-batches are nested differently; return the same nest for each")
    if any(tensor.ndim == 0 for tensor in first.tensors):
        raise ValueError("an output is a scalar, which cannot be concatenated: return one number per example")
    if short := [tensor for tensor in first.tensors if tensor.ndim <= dimension]:
        raise ValueError(
            f"an output has the shape {tuple(short[0].shape)}, but output_dimension={dimension} says that its examples "
            "are in a dimension that it does not have; change the one or the other"
        )
    for payload, size in zip(payloads, sizes, strict=True):
        for tensor in payload.tensors:
            if len(payloads) > 1 and tensor.shape[dimension] != size:
                raise ValueError(
                    f"an output has the shape {tuple(tensor.shape)} for a micro-batch of {size} examples; outputs need "
                    f"the examples in dimension {dimension} to be put together: let the last layer return them so, or "
                    "set output_dimension"
                )
    columns = zip(*(payload.tensors for payload in payloads), strict=True)
    return unflatten(first.structure, [torch.cat(column, dimension) for column in columns])
