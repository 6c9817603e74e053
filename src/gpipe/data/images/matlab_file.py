"""How much a MATLAB file unpacks to, before anything unpacks it."""

import struct
import zlib
from pathlib import Path

_HEADER_BYTES = 128
_COMPRESSED = 15  # the type of an element that zlib has packed
_MAX_BYTES = 1 << 26  # the annotations of the Stanford Cars unpack to a tenth of it


def check_unpacked_size(path: Path) -> None:
    """Refuse a file of MATLAB 5 to 7 that unpacks to more than 64 MiB; what it says is not looked at.

    scipy would unpack it whole, a thousand times its size at worst. Source of the format: MathWorks, "MAT-File Format",
    chapter 1: a header, and elements that begin with their type and number of bytes. Raises ValueError.
    """
    content = path.read_bytes()
    order = "<" if content[126:128] == b"IM" else ">"
    start, unpacked = _HEADER_BYTES, 0
    while start + 8 <= len(content):
        kind, num_bytes = struct.unpack_from(f"{order}2I", content, start)
        start += 8
        if kind == _COMPRESSED:
            try:
                unpacked += len(zlib.decompressobj().decompress(content[start : start + num_bytes], _MAX_BYTES + 1))
            except zlib.error as error:
                raise ValueError(f"cannot read {path}: {error}; replace it with the original file") from error
        if unpacked > _MAX_BYTES:
            raise ValueError(f"{path} unpacks to more than 64 MiB; replace it with the original file")
        start += num_bytes
