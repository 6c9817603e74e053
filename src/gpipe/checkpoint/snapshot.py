"""The files of one process's layers, in memory."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe.checkpoint.file_image import FileImage
from gpipe.checkpoint.names import layer_of
from gpipe.checkpoint.state import Kinds


class Snapshot:
    """Copies of this process's tensors as they are at one moment, `<kind>-<stage>.safetensors` each.

    `take` in the thread that trains, then `copy` and `write` in another one.

    The memory is kept and used again. Tied parameters are copied under each of their names.

    Args:
        partitions: the numbers of layers of all stages; a stage without tensors here gets no file.
    """

    def __init__(self, partitions: Sequence[int]) -> None:
        self._ends = list(accumulate(partitions))
        self._images: dict[str, FileImage] = {}
        self._kinds: dict[str, str] = {}
        self._taken: Mapping[str, dict[str, Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, kinds: Kinds) -> None:
        """Take the tensors as they are now; until `copy` has returned they must not change."""
        self._taken = self._parts(kinds)
        for device in {tensor.device for part in self._taken.values() for tensor in part.values() if tensor.is_cuda}:
            # Beside the stream that computes, which goes on meanwhile; but after what it has been given so far.
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self) -> None:
        """Copy the tensors; when this returns they may change."""
        parts, self._taken = self._taken, {}
        for file in set(self._images) - set(parts):
            del self._images[file]
        with ExitStack() as streams:
            for stream in self._streams.values():
                streams.enter_context(torch.cuda.stream(stream))  # which is the current one on its own device alone
            for file, tensors in parts.items():
                if file not in self._images or not self._images[file].fits(tensors):
                    self._images.pop(file, None)  # before the new one takes its memory
                    self._images[file] = FileImage.of(tensors)
                self._images[file].copy(tensors)
        for stream in self._streams.values():
            stream.synchronize()

    def write(self, folder: Path, go_on: Callable[[], bool]) -> dict[str, Any]:
        """Write the files and flush them; return their entries in a manifest, as JSON."""
        files: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for file, image in self._images.items():
            entry = image.write(folder / file, go_on)
            files[file] = {"size": entry.size, "sha256": entry.sha256}
            own = tensors.setdefault(self._kinds[file], {})
            for name, form in image.forms.items():
                own[name] = {"file": file, "dtype": form.dtype, "shape": list(form.shape)}
        return {"files": files, "tensors": tensors}

    def _parts(self, kinds: Kinds) -> Mapping[str, dict[str, Tensor]]:
        """Return the tensors of each file."""
        parts: dict[str, dict[str, Tensor]] = {}
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                file = f"{kind}-{bisect_right(self._ends, layer_of(name))}.safetensors"
                self._kinds[file] = kind
                parts.setdefault(file, {})[name] = tensor
        return parts
