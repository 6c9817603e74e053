"""A checkpoint's files: names of tensors, the safetensors format, and opening only regular files.

    8 bytes     the length of the JSON, a little-endian number
    JSON        {"layers.0.weight": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}, ...}, padded with spaces
    the data    in the order of the offsets, without gaps

Source: the format's description in the safetensors repository.
"""

import errno
import hashlib
import json
import math
import mmap
import os
import re
import stat
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.durable_files import replacing

_ALIGNMENT = 8
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU
_CHUNK_BYTES = 2**24  # after each chunk, a writer stops if its checkpoint is no longer needed
_FLUSH_CHUNKS = 64  # after this many, a flush shows that the disk keeps up
_LAYER_NAME = re.compile(r"layers\.(0|[1-9]\d{0,8})\..+")
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
"""The dtypes that a checkpoint may have, by their names in torch."""


def parse_layer(name: str) -> int:
    """Return the index of the layer that a tensor called `layers.<i>.<name>` belongs to."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"The tensor name {name!r} is not of the form layers.<i>.<name>: rename it.")
    return int(match[1])


def parse_parameter(key: str) -> str:
    """Return the parameter's name in the optimiser's `<parameter name>/<slot>`; a parameter's own name stays."""
    return key.rsplit("/", 1)[0]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its numbers: its dtype as in torch ("float32") and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        """Return a tensor's spec.

        Raises:
            CheckpointError: checkpoints do not have the dtype.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} has the dtype {dtype}, expected one of {', '.join(DTYPES)}: convert it.")
        return cls(dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """The size of its numbers."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class FileImage:
    """The bytes of a file in memory: its header, and its data in one buffer that the next checkpoint reuses.

    Tensors are copied in quickly and written while training continues. safetensors' own writer is not used, because it
    holds Python's lock while it writes, so training would stop.

    With `pinned`, the buffer is where a GPU can write to it directly; `metadata` has texts for the header.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], *, pinned: bool = False, metadata: Mapping[str, str] | None = None
    ) -> None:
        self.specs = dict(specs)
        num_bytes = sum(spec.num_bytes for spec in self.specs.values())
        # Pinned or filled, so that the operating system allocates its memory here and not during the first copy.
        self._data = self._pin(num_bytes) if pinned and num_bytes else torch.zeros(num_bytes, dtype=torch.uint8)
        self._views: dict[str, Tensor] = {}
        content: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        # Wide dtypes first: every tensor then begins at a multiple of its own width.
        for name, spec in sorted(specs.items(), key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0])):
            start, end = end, end + spec.num_bytes
            content[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
            self._views[name] = self._data[start:end].view(DTYPES[spec.dtype]).view(spec.shape)
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._header = len(text).to_bytes(8, "little") + text

    def _pin(self, num_bytes: int) -> Tensor:
        """Return pinned memory of that size; torch's own allocator would take the next power of two."""
        memory = mmap.mmap(-1, num_bytes)  # in its own pages
        data = torch.frombuffer(memory, dtype=torch.uint8)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), num_bytes, _PORTABLE)))
        weakref.finalize(self, _unpin, data.data_ptr(), memory).atexit = False
        return data

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors' values; from a GPU without waiting until they have arrived."""
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor, non_blocking=True)

    def write(self, path: Path, go_on: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """Write the file, which appears when it is complete and on the disk.

        Returns:
            The manifest's entry as JSON: the size, and the SHA-256 of what was meant to be written.

        Raises:
            CheckpointError: `go_on`, which is called before each chunk, returned False.
        """
        digest = hashlib.sha256()
        data: Any = self._data.numpy().data
        chunks = (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
        with replacing(path) as partial, partial.open("wb") as file:
            for number, part in enumerate(chain((self._header,), chunks), 1):
                if not go_on():
                    raise CheckpointError(f"{path} is no longer needed")
                file.write(part)
                digest.update(part)
                if number % _FLUSH_CHUNKS == 0:
                    file.flush()
                    os.fsync(file.fileno())
        return {"size": len(self._header) + len(data), "sha256": digest.hexdigest()}


def _unpin(address: int, memory: mmap.mmap) -> None:  # noqa: ARG001 - it lives until here
    torch.cuda.cudart().cudaHostUnregister(address)


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return the tensors of a safetensors file by name, without their numbers.

    Raises:
        DamagedCheckpoint: it is not such a file, or has a dtype that no checkpoint has.
    """
    dtypes = {short: name for name, short in _NAMES.items()}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
            return {name: TensorSpec(dtypes[one.get_dtype()], tuple(one.get_shape())) for name, one in slices.items()}
    except (KeyError, SafetensorError) as error:
        fault = shorten(str(error), 300)
        raise DamagedCheckpoint(f"{path} is not a file of a model's weights ({fault}): choose another.") from None


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in the header of a safetensors file that `read_specs` accepts."""
    with safe_open(path, framework="pt", device="cpu") as file:
        return dict(file.metadata() or {})


def check_header(path: Path, expected: Mapping[str, TensorSpec]) -> None:
    """Compare a file's header with the tensors that it should have; safetensors compares it with the file's size."""
    found = read_specs(path)
    for name in sorted({*found, *expected}):
        here, there = (str(specs.get(name, "absent")) for specs in (found, expected))
        if here != there:
            fault = shorten(f"{name} is {here}, expected {there}", 300)
            raise DamagedCheckpoint(f"{path} disagrees with its manifest ({fault}): choose another.")


def shorten(text: str, length: int) -> str:
    """Return the beginning of a text that may be hostile, as one line that any terminal can print."""
    return "".join(char if char.isprintable() else "?" for char in text[:length])


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; refuse links, pipes and devices.

    A link could lead out of the checkpoint's folder, and a pipe could keep the program waiting forever.

    Raises:
        DamagedCheckpoint: the file is missing, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: the checkpoint is incomplete, choose another.") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise
        raise _not_a_file(path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    return open(descriptor, "rb")  # noqa: PTH123 - of a descriptor, not of a path


def _not_a_file(path: Path) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is not a regular file, such as a link that may lead elsewhere: choose another.")
