"""The outputs of a mini-batch, concatenated from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpipe.pipeline.microbatch import Payload, unflatten


def merge(payloads: Sequence[Payload], sizes: Sequence[int], dimension: int = 0) -> Any:
    """Concatenate the outputs of the micro-batches of one mini-batch along the examples' dimension.

    Raises:
        ValueError: the outputs are not nested alike, an output lacks the dimension, or its length there is not its
            micro-batch's size (where there are several).
    """
    first = payloads[0]
    if any(payload.structure != first.structure for payload in payloads):
        raise ValueError("the outputs of the micro-batches are nested differently; return the same nest for each")
    for payload, size in zip(payloads, sizes, strict=True):
        for tensor in payload.tensors:
            if tensor.ndim <= dimension or (len(payloads) > 1 and tensor.shape[dimension] != size):
                raise ValueError(
                    f"an output has the shape {tuple(tensor.shape)} for a micro-batch of {size} examples; outputs are "
                    f"concatenated along dimension {dimension}, so it must have the examples: let the last layer "
                    "return them there, or set output_dimension"
                )
    columns = zip(*(payload.tensors for payload in payloads), strict=True)
    return unflatten(first.structure, [torch.cat(column, dimension) for column in columns])
