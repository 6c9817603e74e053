"""Save checkpoints while training continues: each stage saves its own layers, and the first one the rest."""

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpipe.checkpoint.content import Content, Kinds
from gpipe.checkpoint.errors import CheckpointError, raise_first, run_on_all
from gpipe.checkpoint.folder import clean, name_step, publish
from gpipe.checkpoint.format import TensorSpec
from gpipe.checkpoint.manifest import write_manifest
from gpipe.checkpoint.writer import Snapshot, Writer, take_parts, write_part
from gpipe.durable_files import OwnFolder
from gpipe.pipeline.engine import Pipeline

_GRACE_SECONDS = 2.0  # after training has failed; a process must end within the pipeline's time-out and 5 seconds
_ROUND_SECONDS = 0.02


class Saver:
    """Saves checkpoints of a pipeline as `folder/step-<step>`; every process creates one and calls the same methods.

    Args:
        folder: a folder that all processes see. The first save or rehearsal creates it, and removes what interrupted
            saves have left in it.
        pipeline: the pipeline whose processes save together.
        keep: the number of newest checkpoints to keep, besides the best.

    Attributes:
        saved_step: the step of the folder's newest checkpoint; None if that is unknown.

    Raises:
        ValueError: `keep` is below 1, which would delete what was just saved.
    """

    def __init__(self, folder: Path, pipeline: Pipeline, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1: the newest checkpoint must be kept.")
        self.saved_step: int | None = None
        self._folder, self._pipeline, self._keep = folder, pipeline, keep
        self._snapshot = Snapshot(pipeline.partitions)
        self._writer: Writer | None = None
        self._num_saves = 0
        self._own: OwnFolder | None = None
        self._token = ""
        self._leads = pipeline.is_first
        self._writes = pipeline.job.replica_index == 0
        self._num_processes = 0

    def _open(self) -> None:
        """Prepare the folder before the first save."""
        if self._pipeline.shards_replicas:
            raise ValueError(
                "shard_replicas is True, but a checkpoint has whole weights: save the parts with "
                "torch.distributed.checkpoint, or set shard_replicas=False."
            )
        if self._writes and not self._token:
            self._lead(self._clean)
            # No other process, not even one of this run that was believed dead, writes to a folder of this name.
            tokens = self._pipeline.job.gather(secrets.token_hex(4))
            self._token, self._num_processes = tokens[0], len(tokens)

    def rehearse(self, content: Content) -> None:
        """Do what `save` does, but without the tensors' values, and leave nothing behind.

        Raises:
            ValueError: the replicas shard their weights.
            CheckpointError: on every process that writes, if one of them could not save.
        """
        with self._pipeline.job.activity.doing("rehearsing a save"):
            self._open()
            kinds = content.tensors
            if self._writes:
                self._rehearse(content, kinds)

    def _rehearse(self, content: Content, kinds: Kinds) -> None:
        partial = self._name_partial(content)

        def write_own_part() -> int:
            """Write a part without tensors into a folder that all processes see; return the tensors' bytes."""
            specs = [TensorSpec.of(name, tensor) for tensors in kinds.values() for name, tensor in tensors.items()]
            write_part(partial, self._pipeline.job.process, {})
            return sum(spec.num_bytes for spec in specs)

        def write_all(num_bytes: int) -> None:
            """Write a manifest, rename its folder and delete it; `num_bytes` of tensors must fit onto the disk."""
            files = take_parts(partial, self._num_processes)
            write_manifest(partial, content.describe(self._pipeline.num_layers), files)
            disk = shutil.disk_usage(self._folder)
            if disk.total > 0 and disk.free < num_bytes:  # some network disks do not report their size
                raise CheckpointError(
                    f"{self._folder} has room for {disk.free:,} bytes, but a checkpoint has more than {num_bytes:,}: "
                    "make room on that disk, or set trainer.checkpoints.keep=null, which saves nothing."
                )
            renamed = partial.with_suffix(".deleted")
            partial.rename(renamed)
            shutil.rmtree(renamed)

        try:
            self._lead(partial.mkdir)
            num_bytes = sum(self._pipeline.job.gather(run_on_all(self._pipeline, write_own_part)))
            self._lead(lambda: write_all(num_bytes))
        finally:
            if self._leads:
                shutil.rmtree(partial, ignore_errors=True)

    def save(self, content: Content, *, is_best: bool = False) -> Path:
        """Begin to save, and return the folder that the checkpoint will have.

        Weights, averages and the optimiser's state may change after `wait_until_copied`; buffers, which a forward pass
        changes, as soon as this returns. Waits for the previous save.

        Raises:
            CheckpointError: on every process that writes, if one of them failed in this save or the one before.
        """
        self.saved_step = content.position.step
        path = self._folder / name_step(self.saved_step)
        with self._pipeline.job.activity.doing(f"saving after step {self.saved_step}"):
            self._open()
            kinds = content.tensors
            if self._writes:
                self._save(content, kinds, path, is_best=is_best)
        return path

    def _save(self, content: Content, kinds: Kinds, path: Path, *, is_best: bool) -> None:
        self.wait()
        self._num_saves += 1
        partial = self._name_partial(content)
        self._lead(lambda: self._begin(partial))
        # With copies of the buffers, which the next forward pass changes.
        parameters = dict(self._pipeline.layers.named_parameters(prefix="layers", remove_duplicate=False))
        weights = {name: each if name in parameters else each.clone() for name, each in kinds["weights"].items()}
        self._snapshot.take({**kinds, "weights": weights})
        fields = content.describe(self._pipeline.num_layers)

        def finish(files: Mapping[str, Any]) -> None:
            write_manifest(partial, fields, files)
            publish(partial, path, keep=self._keep, is_best=is_best)

        self._writer = Writer(
            self._snapshot, partial, self._pipeline, finish if self._leads else None, self._num_processes
        )

    def wait_until_copied(self) -> None:
        """Wait until the tensors may change; each process calls it before it updates them."""
        if self._writer is not None:
            self._writer.wait_until_copied()

    def status(self) -> dict[str, Any] | None:
        """Return the status of this process's part of the save under way, for `check`; None if there is none."""
        return None if self._writer is None else self._writer.status()

    def check(self, statuses: Sequence[dict[str, Any] | None]) -> None:
        """Between steps, raise CheckpointError on all processes if one of them failed in the save under way.

        The statuses are those of all processes; they travel with the step's other messages.
        """
        known = [status for status in statuses if status is not None]
        try:
            raise_first(status["error"] for status in known)
        except CheckpointError:
            self._give_up()
            raise
        if known and all(status["is_done"] for status in known):
            self._writer = None

    def wait(self) -> None:
        """Wait until the save under way is finished on all processes; raise CheckpointError on all if one failed."""
        while self._writer is not None:
            # In short rounds: a slow disk must not look like a process that hangs.
            self._writer.wait(_ROUND_SECONDS)
            self.check(self._pipeline.job.gather(self._writer.status()))

    def abandon(self) -> None:
        """After training has failed, give the save under way a moment to finish or to stop."""
        if self._writer is not None:
            self._writer.wait(_GRACE_SECONDS)
            self._writer.give_up(seconds=1.0)
            self._writer = None

    def _lead(self, work: Callable[[], None]) -> None:
        """Call `work` on the leading process; if it fails there, raise on all."""
        run_on_all(self._pipeline, work if self._leads else lambda: None)

    def _clean(self) -> None:
        clean(self._folder)
        self._own = OwnFolder(self._folder)

    def _begin(self, partial: Path) -> None:
        """Create the folder for a save, unless another run's folder has replaced this run's."""
        assert self._own is not None, "only the leading process begins"
        try:
            self._own.check()
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        partial.mkdir()

    def _name_partial(self, content: Content) -> Path:
        """Return the folder that the save under way writes to; `clean` knows this form of name."""
        return self._folder / f".{name_step(content.position.step)}.partial-{self._token}-{self._num_saves}"

    def _give_up(self) -> None:
        """Stop writing; when all processes have stopped, delete what was written, because the disk may be full."""
        if (writer := self._writer) is None:
            return
        writer.give_up(seconds=_GRACE_SECONDS)  # a disk that does not answer may hold it for ever
        self._writer = None
        self._pipeline.job.gather(None)
        if self._leads:
            shutil.rmtree(writer.partial, ignore_errors=True)
