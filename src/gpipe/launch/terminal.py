"""Let a run continue when its standard output or error closes. Nothing here imports torch."""

import io
import sys
from typing import Any


class _TolerantFile(io.FileIO):
    """A file descriptor that drops what it cannot write: a dead `tee` or a closed window must not end the training."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def outlive_readers() -> None:
    """Keep the prints of this process from failing; streams that replaced the system's own stay unchanged."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            tolerant = io.TextIOWrapper(
                io.BufferedWriter(_TolerantFile(stream.fileno(), "wb", closefd=False)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, tolerant)
