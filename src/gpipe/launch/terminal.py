"""Where a run prints to: a terminal, a file or a pipe, which may be gone before the run is. Nothing imports torch."""

import io
import sys
from typing import Any


class _Lasting(io.FileIO):
    """A file descriptor that drops what cannot be written: a `tee` that died, or a closed window, ends no training."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def outlive_readers() -> None:
    """Let no print of this process fail from here on; streams that are not the system's own stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lasting(stream))


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
