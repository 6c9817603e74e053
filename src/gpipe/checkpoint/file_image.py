"""The bytes of a safetensors file in memory: tensors are copied in quickly, and written out while training goes on."""

import hashlib
import os
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gpipe.checkpoint.files import FileEntry
from gpipe.checkpoint.header import DTYPES, Form, form_of, make_header

_CHUNK_BYTES = 2**24  # after so many, a writer that nobody wants any more stops
_FLUSH_CHUNKS = 64  # after so many, the disk shows that it keeps up


class FileImage:
    """A file's header, and its data in one buffer that is used again for the next checkpoint.

    safetensors' own writer is not used: it would hold Python's lock while it writes, and training would stand still.

    Args:
        forms: of the tensors that the file will have, by name.
        pinned: keep the buffer where a GPU can write to it directly.
    """

    def __init__(self, forms: Mapping[str, Form], *, pinned: bool = False) -> None:
        self.forms = dict(forms)
        self.pinned = pinned
        self._header, starts = make_header(self.forms, {"format": "pt"})
        num_bytes = sum(form.num_bytes for form in self.forms.values())
        # Filled, so that the operating system hands out its memory here and not during the first copy.
        self._data = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._views = {
            name: self._data[start : start + form.num_bytes].view(DTYPES[form.dtype]).view(form.shape)
            for name, start in starts.items()
            for form in (self.forms[name],)
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "FileImage":
        """Return an image for such tensors; nothing is copied yet."""
        forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
        return cls(forms, pinned=any(tensor.is_cuda for tensor in tensors.values()))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Say whether tensors have the names and the forms that this image was made for."""
        return self.forms == {name: form_of(name, tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors' values; from a GPU without waiting until they have arrived."""
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor, non_blocking=True)

    def write(self, path: Path, go_on: Callable[[], bool] = lambda: True) -> FileEntry:
        """Write the file and flush it to the disk; return its size and the hash of what was meant to be written.

        go_on: is asked now and then; raises InterruptedError where it says no.
        """
        digest = hashlib.sha256()
        data: Any = self._data.numpy().data
        chunks = (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
        try:
            with path.open("xb") as file:
                for number, part in enumerate(chain((self._header,), chunks), 1):
                    if not go_on():
                        raise InterruptedError(f"{path} is not needed any more")
                    file.write(part)
                    digest.update(part)
                    if number % _FLUSH_CHUNKS == 0:
                        _flush(file)
                _flush(file)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            # Such as a full disk, of which the operating system's message does not say where it is.
            raise type(error)(error.errno, error.strerror, str(path)) from None
        return FileEntry(len(self._header) + len(data), digest.hexdigest())


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
