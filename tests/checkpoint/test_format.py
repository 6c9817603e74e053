"""A header that claims what is not there is refused, in a sentence and without taking memory."""

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.format import TensorSpec, check_header
from gpipe.checkpoint.manifest import Manifest

MAX_HEADER_BYTES = 100_000_000  # what safetensors reads at most
MOST_BYTES = 2**20  # of Python's memory
INVALID = "Error while deserializing header"  # as safetensors says it


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(dtype: str = "F32", shape: Sequence[int] = (2,), span: Sequence[int] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", INVALID),
        (b"\xff" * 8, INVALID),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * 64, INVALID),
        ((100).to_bytes(8, "little") + b"{}", INVALID),
        ((2).to_bytes(8, "little") + b"[]", INVALID),
        ((2).to_bytes(8, "little") + b"{]", INVALID),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, INVALID),
        (header(), r"a is absent, expected float32\[2\]"),
        (header(a=None) + bytes(8), INVALID),
        (header(a=tensor("I32")) + bytes(8), r"a is int32\[2\], expected float32\[2\]"),
        (header(a=tensor("F64", [1])) + bytes(8), r"a is float64\[1\], expected float32\[2\]"),
        (header(a=tensor(shape=[1, 2])) + bytes(8), r"a is float32\[1, 2\], expected float32\[2\]"),
        (header(a=tensor("F64")) + bytes(8), INVALID),
        (header(a=tensor(span=[0, 2**42])) + bytes(8), INVALID),
        (header(a=tensor(shape=[2**40], span=[0, 2**42])) + bytes(8), INVALID),
        (header(a=tensor(shape=[2**62, 2**62])) + bytes(8), INVALID),
        (header(a=tensor(span=[4, 12])) + bytes(12), INVALID),
        (header(a=tensor(), b=tensor()) + bytes(8), INVALID),
        (header(a=tensor()) + bytes(4), INVALID),
        (header(a=tensor()) + bytes(12), INVALID),
        (header(a=tensor(), b={}) + bytes(8), INVALID),
        (
            header(a=tensor(), **{"b\n": tensor(shape=[0], span=[8, 8])}) + bytes(8),
            r"b\? is .*expected absent",
        ),
        (header(**{"b\n" * 999: tensor(span=[4, 12])}) + bytes(12), INVALID),
    ],
)
def test_a_header_that_claims_what_is_not_there(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "weights-0.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=fault) as raised:
        check_header(path, {"a": TensorSpec("float32", (2,))})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_the_headers_of_a_checkpoint_are_good(checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    for name in manifest.files:
        check_header(checkpoint / name, manifest.specs_in(name))
