"""The checkpoints of a training: those that it saves, and the one that it resumes from."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe.checkpoint.content import Content, OptimizerState
from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint
from gpipe.checkpoint.folder import list_newest_first
from gpipe.checkpoint.format import parse_parameter
from gpipe.checkpoint.manifest import Manifest, Position
from gpipe.checkpoint.read import load_checkpoint, load_weights
from gpipe.checkpoint.saver import Saver
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.shared.sharded_optimizer import ShardedOptimizer
from gpipe.training.ema import Ema
from gpipe.training.optimizers import load_optimizer_state, named_parameters_of, optimizer_state


def get_tensors(pipeline: Pipeline, ema: Ema | None = None) -> dict[str, dict[str, Tensor]]:
    """Return this process's weights and averages, by kind and name; they share the pipeline's memory."""
    kinds: dict[str, dict[str, Tensor]] = {"weights": dict(pipeline.layers.state_dict(prefix="layers."))}
    if ema is not None:
        kinds["ema"] = ema.state()
    return kinds


def wrap_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Wrap an optimiser, built from (name, parameter) pairs, for checkpoints."""
    parameters = named_parameters_of(optimizer)
    read, load = partial(optimizer_state, optimizer), partial(load_optimizer_state, optimizer)
    if not isinstance(optimizer, ShardedOptimizer):
        return OptimizerState(type(optimizer).__name__, parameters, read, load)

    def gather() -> dict[str, Tensor]:
        found, order = optimizer.gather(read()), {name: number for number, name in enumerate(parameters)}
        return {key: found[key] for key in sorted(found, key=lambda key: order[parse_parameter(key)])}

    def load_own(state: Mapping[str, Tensor]) -> None:
        load({key: value for key, value in state.items() if optimizer.keeps(parameters[parse_parameter(key)])})

    return OptimizerState(type(optimizer.whole).__name__, parameters, gather, load_own)


class Checkpoints:
    """Saves and loads a pipeline, its optimiser and averages; every process creates one and calls the same methods.

    Args:
        folder: the folder of the checkpoints; None saves and loads nothing.
        pipeline: the pipeline whose layers are saved.
        optimizer: the optimiser whose state is saved.
        ema: the averages; None if there are none.
        keep: the number of newest checkpoints to keep, besides the best; None saves nothing.
        config: the run's settings, as JSON, saved in each checkpoint.
        say: prints a warning.

    Raises:
        ValueError: keep is not positive.
        TypeError: the optimiser does not know its parameters' names, so its state cannot be saved.

    Attributes:
        saved_step: the step of the folder's newest checkpoint; None if there is none.
    """

    def __init__(
        self,
        folder: Path | None,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        *,
        keep: int | None,
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        if folder is not None:
            named_parameters_of(optimizer)
        self.saved_step: int | None = None
        self._folder, self._pipeline, self._optimizer, self._ema = folder, pipeline, optimizer, ema
        self._keep, self._config, self._say = keep, config, say
        self._saver: Saver | None = None

    def load(self, path: Path) -> Manifest:
        """Load the state of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        model, optimizer = get_tensors(self._pipeline, self._ema), wrap_optimizer(self._optimizer)
        manifest = load_checkpoint(path, self._pipeline, model, optimizer)
        if path.parent == self._folder:
            self.saved_step = manifest.position.step
        return manifest

    def load_newest(self) -> tuple[Path, Manifest] | None:
        """Load the folder's newest undamaged checkpoint, and warn of damaged ones.

        Returns:
            The checkpoint's folder and manifest; None if there are no checkpoints.

        Raises:
            CheckpointError: all are damaged; a new run would silently overwrite them.
        """
        paths = list_newest_first(self._folder) if self._folder is not None else []
        for path in paths:
            try:
                return path, self.load(path)
            except DamagedCheckpoint as damage:
                self._say(f"warning: {damage}")
        if paths:
            raise CheckpointError(
                f"{self._folder} has {len(paths)} checkpoints, all of them damaged: remove it to start anew."
            )
        return None

    def load_weights(self, path: Path, replaced: Collection[str]) -> None:
        """Load a checkpoint's averages or, if it has none, its weights; leave the tensors called `replaced` unchanged.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
        """
        model = get_tensors(self._pipeline, self._ema)
        load_weights(
            path,
            self._pipeline,
            model,
            replaced=replaced,
            settings=self._config.get("model"),
            model_names=self._config.get("model_names"),
        )

    def rehearse(self, position: Position, results: Mapping[str, Any]) -> None:
        """Check, before training begins, that it can be saved.

        Raises:
            CheckpointError: it cannot be saved.
        """
        if (saver := self._open_saver()) is None:
            return
        with self._pipeline.job.activity.doing("rehearsing a save"):
            saver.rehearse(self._content(position, results))

    def save(self, position: Position, results: Mapping[str, Any], *, is_best: bool = False) -> None:
        """Begin to save, unless saving is off or this step is saved; the next steps can run meanwhile."""
        if self.saved_step == position.step or (saver := self._open_saver()) is None:
            return
        self.saved_step = position.step
        with self._pipeline.job.activity.doing(f"saving after step {position.step}"):
            saver.save(self._content(position, results), is_best=is_best)

    def wait_until_copied(self) -> None:
        """Wait until weights, averages and the optimiser's state may change, if a save is under way."""
        if self._saver is not None:
            self._saver.wait_until_copied()

    def status(self) -> dict[str, Any] | None:
        """Return the status of this process's part of the save under way, for `check`; None if there is none."""
        return self._saver.status() if self._saver is not None else None

    def check(self, statuses: Sequence[dict[str, Any] | None]) -> None:
        """Raise CheckpointError on all processes if one failed in the save under way; `statuses` are those of all."""
        if self._saver is not None:
            self._saver.check(statuses)

    def finish(self) -> None:
        """Wait until the save under way is finished.

        Raises:
            CheckpointError: on all processes, if one of them failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def abandon(self) -> None:
        """After training has failed, give the save under way a moment to finish or to stop."""
        if self._saver is not None:
            self._saver.abandon()

    def _open_saver(self) -> Saver | None:
        """Return the saver, which creates the folder when constructed; None if nothing is saved."""
        if self._saver is None and self._folder is not None and self._keep is not None:
            self._saver = Saver(self._folder, self._pipeline, keep=self._keep)
        return self._saver

    def _content(self, position: Position, results: Mapping[str, Any]) -> Content:
        return Content(
            position,
            get_tensors(self._pipeline, self._ema),
            wrap_optimizer(self._optimizer),
            config=self._config,
            results=results,
        )
