"""Save checkpoints while training goes on: each stage its own layers, the first one the rest.

    rehearse  before anything is trained: each process writes a file, the leader a manifest, and all of it is deleted
    save      each process notes its tensors; the leader makes a partial folder
    thread    each process copies its tensors in memory, which do not change during a forward and a backward
              each process writes its files and flushes them, then part-<process>.json
              the leader waits for all parts, writes manifest.json, renames the folder, moves `latest`, deletes old ones
    update    of the weights: waits until the tensors are copied
    check     at the boundaries of the following steps: all processes raise an error that one had

The processes need a file system that all of them see. Replicas other than the first have the same tensors and write
nothing.
"""

import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gpipe.checkpoint.agreement import raise_first, together
from gpipe.checkpoint.entries import Position
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.folder import clean, name_of
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.rehearsal import rehearse_manifest, rehearse_part
from gpipe.checkpoint.snapshot import Snapshot
from gpipe.checkpoint.state import Kinds, OptimizerState
from gpipe.checkpoint.writer import LeadingWriter, Writer
from gpipe.pipeline.engine import Pipeline

_GRACE_SECONDS = 2.0  # after training has failed; a process must end within the pipeline's time-out and 5 seconds
_ROUND_SECONDS = 0.02


class Saver:
    """Saves checkpoints of a pipeline as `folder/step-<step>`; every process makes one and calls the same methods.

    Args:
        folder: which all processes see; it is made, and rests of saves that were cut off are removed from it.
        pipeline: whose processes save together.
        keep: how many of the newest checkpoints stay, beside the best.

    Raises:
        ValueError: keep is not positive.
        CheckpointError: the folder cannot be made.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, but at least 1 checkpoint must be kept.")
        self._folder, self._pipeline, self._keep = folder, pipeline, keep
        self._snapshot = Snapshot(pipeline.partitions)
        self._writer: Writer | None = None
        self._partial: Path | None = None
        self._num_saves = 0
        self._writes = pipeline.job.replica_index == 0
        if self._writes:
            leads = pipeline.is_first
            # Nobody, not even a process of this run that was believed dead, writes to a folder of this name.
            self._token: str = together(pipeline, lambda: _begin(folder) if leads else None)[0]
            self._process = min(pipeline.stages)
            self._processes: list[int] = pipeline.job.gather(self._process)

    def rehearse(
        self,
        position: Position,
        model: Kinds,
        *,
        optimizer: OptimizerState | None = None,
        config: Mapping[str, Any] | None = None,
        results: Mapping[str, Any] | None = None,
    ) -> None:
        """Do what `save` does but for the tensors' numbers, and leave nothing behind.

        Raises CheckpointError on every process that writes where one of them could not save.
        """
        if not self._writes:
            return
        manifest = self._manifest(position, optimizer, config, results)
        partial, leads = self._partial_of(position), self._pipeline.is_first
        kinds = model if optimizer is None else {**model, "optimizer": optimizer.read()}
        try:
            together(self._pipeline, lambda: partial.mkdir() if leads else None)
            sizes = together(self._pipeline, lambda: rehearse_part(partial, self._process, kinds))
            together(
                self._pipeline,
                lambda: rehearse_manifest(partial, manifest, self._processes, sum(sizes)) if leads else None,
            )
        finally:
            if leads:
                shutil.rmtree(partial, ignore_errors=True)

    def save(
        self,
        position: Position,
        model: Kinds,
        *,
        optimizer: OptimizerState | None = None,
        config: Mapping[str, Any] | None = None,
        results: Mapping[str, Any] | None = None,
        is_best: bool = False,
    ) -> Path:
        """Begin to save, and return the checkpoint's folder to be.

        Weights, averages and the optimiser's state may change after `wait_until_copied`; buffers, which a forward
        changes, as soon as this returns. Waits for the save before. `config` and `results` are JSON. is_best: point
        `best` to this checkpoint.
        Raises CheckpointError on every process that writes, where one of them failed in this save or the one before.
        """
        path = self._folder / name_of(position.step)
        if not self._writes:
            return path
        self.wait()
        self._num_saves += 1
        partial = self._partial_of(position)
        kinds = {**model, "weights": self._without_buffers(model["weights"])}
        if optimizer is not None:
            kinds["optimizer"] = optimizer.read()
        together(self._pipeline, lambda: partial.mkdir() if self._pipeline.is_first else None)
        self._snapshot.take(kinds)
        if self._pipeline.is_first:
            manifest = self._manifest(position, optimizer, config, results)
            self._writer = LeadingWriter(
                self._snapshot,
                partial,
                self._process,
                self._pipeline,
                manifest=manifest,
                path=path,
                processes=self._processes,
                publishing={"keep": self._keep, "is_best": is_best},
            )
        else:
            self._writer = Writer(self._snapshot, partial, self._process, self._pipeline)
        self._partial = partial
        self._writer.start()
        return path

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change; each process calls it before it updates them."""
        if self._writer is not None:
            self._writer.wait_until_copied()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, as far as `check` and `wait` have seen: the same on all processes that write."""
        return self._writer is not None

    def status(self) -> dict[str, Any] | None:
        """Return how this process's part of the save that is under way goes, for `check`; None where none is."""
        return None if self._writer is None else self._writer.status()

    def check(self, statuses: Sequence[dict[str, Any] | None]) -> None:
        """Raise CheckpointError on all processes, if one of them failed in the save that is under way.

        At step boundaries. statuses: of all processes, the same on each; they travel with the step's other messages.
        """
        known = [status for status in statuses if status is not None]
        try:
            raise_first(known)
        except CheckpointError:
            self._give_up()
            raise
        if known and all(status["done"] for status in known):
            self._writer = None

    def wait(self) -> None:
        """Wait until the save under way is finished on all processes; raises CheckpointError as `check` does."""
        while self._writer is not None:
            # In short rounds: a slow disk must not look like a process that hangs.
            self._writer.wait(_ROUND_SECONDS)
            self.check(self._pipeline.job.gather(self._writer.status()))

    def abandon(self) -> None:
        """After an error of the training: give the save that is under way a moment to finish, or to stop."""
        if self._writer is not None:
            self._writer.wait(_GRACE_SECONDS)
            self._writer.give_up(seconds=1.0)
            self._writer = None

    def _partial_of(self, position: Position) -> Path:
        """Return the folder into which the save under way is written; `clean` knows its name."""
        return self._folder / f".{name_of(position.step)}.partial-{self._token}-{self._num_saves}"

    def _manifest(
        self,
        position: Position,
        optimizer: OptimizerState | None,
        config: Mapping[str, Any] | None,
        results: Mapping[str, Any] | None,
    ) -> Manifest:
        """Return the manifest of a checkpoint, which lacks what the processes write."""
        return Manifest(
            position=position,
            num_layers=self._pipeline.num_layers,
            optimizer=optimizer.name if optimizer is not None else None,
            config=dict(config or {}),
            results=dict(results or {}),
        )

    def _without_buffers(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights, and copies of the buffers among them."""
        parameters = dict(self._pipeline.layers.named_parameters(prefix="layers", remove_duplicate=False))
        return {name: tensor if name in parameters else tensor.clone() for name, tensor in weights.items()}

    def _give_up(self) -> None:
        """Stop writing; when all processes have, free what was written: the disk may be full."""
        if self._writer is None or self._partial is None:
            return
        self._writer.give_up(seconds=_GRACE_SECONDS)  # a disk that does not answer may hold it for ever
        self._writer = None
        self._pipeline.job.gather(None)
        if self._pipeline.is_first:
            shutil.rmtree(self._partial, ignore_errors=True)


def _begin(folder: Path) -> str:
    clean(folder)
    return secrets.token_hex(4)
