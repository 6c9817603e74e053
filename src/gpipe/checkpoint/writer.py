"""A save under way in one process: the thread that writes while training goes on."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe.checkpoint.agreement import as_json
from gpipe.checkpoint.folder import publish
from gpipe.checkpoint.manifest import MANIFEST, Manifest
from gpipe.checkpoint.snapshot import Snapshot
from gpipe.durable_files import write_flushed
from gpipe.pipeline.engine import Pipeline

_POLL_SECONDS = 0.01


class Writer:
    """Writes the files of one process, and `part-<process>.json` when they are on the disk.

    Args:
        snapshot: what was taken and is to be copied and written; another may be taken when this one is done.
        partial: the folder to write into, which is there.
        process: the number of this one.
        pipeline: this process's, for messages, and for the time after which a disk that does not answer is an error.
    """

    def __init__(self, snapshot: Snapshot, partial: Path, process: int, pipeline: Pipeline) -> None:
        self._snapshot, self._partial, self._process, self._pipeline = snapshot, partial, process, pipeline
        self._place, self._doing = pipeline.job.place, f"saving after step {pipeline.step}"
        self._last_sign = time.monotonic()
        self._given_up, self._copied = threading.Event(), threading.Event()
        self._outcome: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return {"done": whether this process has done its part}, and "error" where it could not."""
        is_done = not self._thread.is_alive()
        silent = time.monotonic() - self._last_sign
        if not is_done and silent > self._pipeline.timeout_seconds:
            return {"done": False, **as_json(OSError(f"the disk does not answer for {silent:.0f} s"), self._place)}
        return {"done": is_done, **self._outcome}

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change."""
        self._copied.wait()

    def wait(self, seconds: float) -> None:
        """Wait until this process has done its part, or so long."""
        self._thread.join(seconds)

    def give_up(self, seconds: float) -> None:
        """Stop at the next moment at which that is possible, and wait for it, at most so long."""
        self._given_up.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with self._pipeline.job.doing_beside(self._doing):
                self._write()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread raises it
            self._outcome = as_json(error, self._place)

    def _write(self) -> None:
        try:
            self._snapshot.copy()
        finally:
            self._copied.set()
        part = self._snapshot.write(self._partial, self._goes_on)
        write_flushed(part_of(self._partial, self._process), json.dumps(part))

    def _goes_on(self) -> bool:
        self._last_sign = time.monotonic()
        return not self._given_up.is_set()

    def _pause(self) -> None:
        """Wait a moment; raises InterruptedError where nobody wants the checkpoint any more."""
        self._last_sign = time.monotonic()
        if self._given_up.wait(_POLL_SECONDS):
            raise InterruptedError(f"{self._partial} is not needed any more")


class LeadingWriter(Writer):
    """Writes what every process does, then waits for the parts of the others and publishes the checkpoint.

    Args:
        manifest: to which the parts are added.
        path: the checkpoint's folder to be.
        processes: the numbers of all of them.
        publishing: settings for `publish`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        partial: Path,
        process: int,
        pipeline: Pipeline,
        *,
        manifest: Manifest,
        path: Path,
        processes: Sequence[int],
        publishing: Mapping[str, Any],
    ) -> None:
        super().__init__(snapshot, partial, process, pipeline)
        self._manifest, self._path, self._processes, self._publishing = manifest, path, processes, publishing

    def _write(self) -> None:
        super()._write()
        for process in self._processes:
            part = part_of(self._partial, process)
            while not part.exists():
                self._pause()
            self._manifest.add(json.loads(part.read_bytes()))
            part.unlink()
        write_flushed(self._partial / MANIFEST, self._manifest.to_json())
        publish(self._partial, self._path, **self._publishing)


def part_of(partial: Path, process: int) -> Path:
    """Return the file in which a process says what it has written."""
    return partial / f"part-{process}.json"
