"""The header of a safetensors file: which tensor lies where in it.

    8 bytes     the length of the JSON, a little-endian number
    JSON        {"layers.0.weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}, ...}, padded with spaces
    the data    in the order of the offsets, without gaps

Source: the format's description in the safetensors repository.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpipe.checkpoint.errors import DamagedCheckpoint
from gpipe.checkpoint.files import open_regular

MAX_HEADER_BYTES = 100_000_000  # what safetensors itself reads at most
_ALIGNMENT = 8
_METADATA = "__metadata__"

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
"""The types of numbers that a checkpoint may have, by their names in torch."""


@dataclass(frozen=True)
class Form:
    """What a tensor is apart from its numbers: its dtype as in torch ("float32") and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its numbers."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def form_of(name: str, tensor: torch.Tensor) -> Form:
    """Return a tensor's form; raises ValueError for a type of numbers that checkpoints do not have."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the type {dtype}, expected one of {', '.join(DTYPES)}: convert it.")
    return Form(dtype, tuple(tensor.shape))


def make_header(forms: Mapping[str, Form], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file of such tensors, and where the data of each begins after them."""
    # Wide types first: every tensor then begins at a multiple of its own width.
    order = sorted(forms, key=lambda name: (-DTYPES[forms[name].dtype].itemsize, name))
    starts: dict[str, int] = {}
    content: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name in order:
        starts[name], end = end, end + forms[name].num_bytes
        content[name] = {
            "dtype": _NAMES[forms[name].dtype],
            "shape": list(forms[name].shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def check_header(path: Path, expected: Mapping[str, Form]) -> None:
    """Compare a file's header with the tensors that it should have, and its offsets with its size.

    Raises DamagedCheckpoint with the first thing that differs; nothing is allocated but the header.
    """
    try:
        found, num_bytes = _read(path)
        names = set(found) - {_METADATA}
        if names != set(expected):
            name = min(names ^ set(expected))
            raise ValueError(f"{name} is {'not there' if name in expected else 'not listed'}")
        spans = sorted(_span(name, found[name], form) for name, form in expected.items())
        _refuse_gaps(spans, num_bytes)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} disagrees with its manifest, {error}: choose another.") from None


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header's JSON and the number of bytes of data behind it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header claims {length} of {size} bytes")
        content = json.loads(file.read(length))
    if not isinstance(content, dict):
        raise ValueError("its header is no JSON object")
    return content, size - 8 - length


def _span(name: str, entry: object, form: Form) -> tuple[int, int]:
    expected = {"dtype": _NAMES[form.dtype], "shape": list(form.shape)}
    if not isinstance(entry, dict) or {key: entry.get(key) for key in expected} != expected:
        raise ValueError(f"{name} is not {form}")
    match entry.get("data_offsets"):
        case [int(start), int(stop)] if stop - start == form.num_bytes:
            return start, stop
    raise ValueError(f"the data of {name} do not have {form.num_bytes} bytes")


def _refuse_gaps(spans: Sequence[tuple[int, int]] | Iterable[tuple[int, int]], num_bytes: int) -> None:
    end = 0
    for start, stop in spans:
        if start != end:
            raise ValueError(f"its data have a gap or overlap at {start}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its data end at {end} of {num_bytes} bytes")
