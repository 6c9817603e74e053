"""The IDX format of MNIST and its successors: a big-endian header and unsigned bytes, compressed with gzip."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def read_idx(path: Path, item_shape: tuple[int, ...], max_items: int) -> NDArray[np.uint8]:
    """Read a gzipped IDX file of unsigned bytes.

    Returns uint8 [n, *item_shape] with n <= max_items. Raises ValueError, which names the file, where the file is not
    exactly that; no more than the expected number of bytes is ever decompressed.
    Source of the format: the MNIST page of Y. LeCun (two zero bytes, type 8, number of dimensions, the dimensions).
    """
    num_dimensions = 1 + len(item_shape)
    try:
        with gzip.open(path) as stream:
            header = _whole_words(stream.read(4 + 4 * num_dimensions))
            _check_header(header, item_shape, max_items)
            num_bytes = int(header[1]) * math.prod(item_shape)
            content = stream.read(num_bytes + 1)  # one more shows that the file goes on
        if len(content) != num_bytes:
            found = "more" if len(content) > num_bytes else str(len(content))
            raise ValueError(f"its header announces {num_bytes} bytes and {found} follow")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}; replace it with the original file") from error
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, *item_shape)


def _whole_words(header: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(header[: len(header) // 4 * 4], dtype=">u4")


def _check_header(header: NDArray[np.uint32], item_shape: tuple[int, ...], max_items: int) -> None:
    num_dimensions = 1 + len(item_shape)
    if len(header) != 1 + num_dimensions:
        raise ValueError(f"it is shorter than its header of {4 + 4 * num_dimensions} bytes")
    magic = 0x0800 + num_dimensions
    if header[0] != magic:
        raise ValueError(f"it begins with {int(header[0]):#010x}, expected {magic:#010x}")
    shape = tuple(int(size) for size in header[2:])
    if shape != item_shape:
        raise ValueError(f"its items have the shape {shape}, expected {item_shape}")
    if not 0 < header[1] <= max_items:
        raise ValueError(f"it announces {int(header[1])} items, expected 1 to {max_items}")
