"""A save in one process: copies of its tensors, and the thread that writes them while training continues."""

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe.checkpoint.content import Kinds
from gpipe.checkpoint.errors import CheckpointError, to_json
from gpipe.checkpoint.format import FileImage, TensorSpec, parse_layer
from gpipe.durable_files import write_flushed
from gpipe.pipeline.engine import Pipeline

_POLL_SECONDS = 0.01


class Snapshot:
    """Copies of this process's tensors at one moment, one file `<kind>-<stage>.safetensors` per stage.

    Call `take` in the training thread, then `copy` and `write` in another one. The memory is kept and reused. A tied
    parameter is copied under each of its names.

    Args:
        partitions: the number of layers of each stage; a stage without tensors here gets no file.
    """

    def __init__(self, partitions: Sequence[int]) -> None:
        self._ends = list(accumulate(partitions))
        self._images: dict[str, FileImage] = {}
        self._taken: dict[str, dict[str, Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, kinds: Kinds) -> None:
        """Take the tensors as they are now; until `copy` has returned they must not change."""
        self._taken = {}
        for kind, tensors in kinds.items():
            for name, tensor in tensors.items():
                file = f"{kind}-{bisect_right(self._ends, parse_layer(name))}.safetensors"
                self._taken.setdefault(file, {})[name] = tensor
        for device in {tensor.device for part in self._taken.values() for tensor in part.values() if tensor.is_cuda}:
            # On a separate stream, so that computation continues; but after the work that was queued before.
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self) -> None:
        """Copy the tensors; when this returns they may change."""
        parts, self._taken = self._taken, {}
        for file in set(self._images) - set(parts):
            del self._images[file]
        with ExitStack() as streams:
            for stream in self._streams.values():
                streams.enter_context(torch.cuda.stream(stream))  # the current stream of its own device alone
            for file, tensors in parts.items():
                specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
                if file not in self._images or self._images[file].specs != specs:
                    self._images.pop(file, None)  # before the new one takes its memory
                    pinned = any(tensor.is_cuda for tensor in tensors.values())
                    self._images[file] = FileImage(specs, pinned=pinned)
                self._images[file].copy(tensors)
        for stream in self._streams.values():
            stream.synchronize()

    def write(self, folder: Path, go_on: Callable[[], bool]) -> dict[str, Any]:
        """Write the files and flush them; return their entries in the manifest, as JSON."""
        return {file: image.write(folder / file, go_on) for file, image in self._images.items()}


@dataclass
class Writer:
    """Writes the files of one process and, when they are on the disk, `part-<process>.json`.

    Attributes:
        snapshot: taken, and not copied yet; another may be taken when this one is written.
        partial: the folder to write into, which exists.
        publish: called on the leading process with the files of all processes, as JSON; None on the others.
    """

    snapshot: Snapshot
    partial: Path
    pipeline: Pipeline
    publish: Callable[[dict[str, Any]], None] | None
    num_processes: int

    def __post_init__(self) -> None:
        self._place, self._doing = self.pipeline.job.place, f"saving after step {self.pipeline.step}"
        self._last_sign = time.monotonic()
        self._given_up, self._copied = threading.Event(), threading.Event()
        self._error: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return, as JSON, whether this process is done and which error it had."""
        is_done, error = not self._thread.is_alive(), self._error
        silent = time.monotonic() - self._last_sign
        if not is_done and silent > self.pipeline.timeout_seconds:
            error = to_json(OSError(f"the disk has not answered for {silent:.0f} s"), self._place)
        return {"is_done": is_done, "error": error}

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change."""
        seconds = self.pipeline.timeout_seconds
        if not self._copied.wait(seconds):
            raise CheckpointError(
                f"{self._place}, {self._doing}: the GPU has not copied the tensors to the host within {seconds:g} s; "
                "find out what delays it, or raise timeout_seconds."
            )

    def wait(self, seconds: float) -> None:
        """Wait until this process is done, for at most `seconds`."""
        self._thread.join(seconds)

    def give_up(self, seconds: float) -> None:
        """Stop as soon as possible, and wait for that, for at most `seconds`."""
        self._given_up.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with self.pipeline.job.activity.doing_beside(self._doing):
                self._write()
        except BaseException as error:  # noqa: BLE001 - the main thread raises any error
            self._error = to_json(error, self._place)

    def _write(self) -> None:
        try:
            self.snapshot.copy()
        finally:
            self._copied.set()
        write_part(self.partial, self.pipeline.job.process, self.snapshot.write(self.partial, self._go_on))
        if self.publish is not None:
            for process in range(self.num_processes):
                while not _name_part(self.partial, process).exists():
                    if not self._go_on(_POLL_SECONDS):
                        raise CheckpointError(f"{self.partial} is no longer needed")
            self.publish(take_parts(self.partial, self.num_processes))

    def _go_on(self, seconds: float = 0.0) -> bool:
        """Note that the disk answers, and return whether the checkpoint is needed `seconds` later."""
        self._last_sign = time.monotonic()
        return not self._given_up.wait(seconds)


def write_part(partial: Path, process: int, files: Mapping[str, Any]) -> None:
    """Write a process's part of the manifest: the files that it has written."""
    write_flushed(_name_part(partial, process), json.dumps(files))


def take_parts(partial: Path, num_processes: int) -> dict[str, Any]:
    """Return the files of all parts of the manifest, and delete the parts."""
    files: dict[str, Any] = {}
    for process in range(num_processes):
        path = _name_part(partial, process)
        files |= json.loads(path.read_bytes())
        path.unlink()
    return files


def _name_part(partial: Path, process: int) -> Path:
    return partial / f"part-{process}.json"
