"""The files of one process's layers, in memory."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
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

    The memory is kept and used again. Tied parameters are copied under each of their names.

    Args:
        partitions: the numbers of layers of all stages; a stage without tensors here gets no file.
    """

    def __init__(self, partitions: Sequence[int]) -> None:
        self._ends = list(accumulate(partitions))
        self._images: dict[str, FileImage] = {}
        self._kinds: dict[str, str] = {}

    def take(self, kinds: Kinds) -> None:
        """Copy the tensors; when this returns they may change."""
        parts = self._parts(kinds)
        for file in set(self._images) - set(parts):
            del self._images[file]
        for file, tensors in parts.items():
            if file not in self._images or not self._images[file].fits(tensors):
                self._images.pop(file, None)  # before the new one takes its memory
                self._images[file] = FileImage.of(tensors)
            self._images[file].copy(tensors)
        for device in {tensor.device for tensors in parts.values() for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)

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
