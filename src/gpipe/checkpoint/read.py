"""Bring back what a checkpoint has: all of a run's state, or the weights that another model begins with.

Every process calls the same function; each opens only the files that have its layers, and verifies their sizes and
hashes. All or nothing: where any process finds a fault, CheckpointError is raised on all of them, and nothing has been
changed.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe.checkpoint.agreement import together
from gpipe.checkpoint.entries import TensorEntry
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.layer_files import describe_differences, differences, read_layers
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.names import describe_names, layer_of, parameter_of
from gpipe.checkpoint.state import Kinds, OptimizerState
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.shared.tied_parameters import checksum

_BUILD_THAT = "build the model, with the settings, that it was saved with."


def load_checkpoint(path: Path, pipeline: Pipeline, model: Kinds, optimizer: OptimizerState | None = None) -> Manifest:
    """Load a checkpoint into this process's tensors, `model`, and into the optimiser if it is given.

    The caller sets `pipeline.step` and the data's position from the manifest that is returned.
    """
    manifest = _read_manifest(path, pipeline)
    if "ema" in model and "ema" not in manifest.tensors:
        raise CheckpointError(f"{path} has no moving averages, but this run keeps them: set ema.decay=null.")
    _refuse_differences(path, pipeline, manifest, model)
    names = {kind: list(tensors) for kind, tensors in model.items()}
    if optimizer is not None:
        together(pipeline, lambda: _check_optimizer(path, manifest, optimizer, _own_entries(manifest, pipeline)))
        names["optimizer"] = list(_own_entries(manifest, pipeline))
    loaded = _read(path, pipeline, manifest, names)
    _refuse_untied(path, pipeline, loaded)
    _copy(loaded, model)
    if optimizer is not None:
        optimizer.load(loaded["optimizer"])
    return manifest


def load_weights(
    path: Path,
    pipeline: Pipeline,
    model: Kinds,
    *,
    replaced: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Manifest:
    """Begin with the model that a checkpoint's run evaluated; `replaced` tensors stay as they are.

    Weights and statistics, and their averages where this run keeps any, begin with the averages of the checkpoint, or
    with its weights where it has no averages. `settings` are this model's, as JSON: where the layers differ, the
    message names the settings that do.
    """
    manifest = _read_manifest(path, pipeline, settings)
    _refuse_partly_replaced(pipeline, replaced)
    source = "ema" if "ema" in manifest.tensors else "weights"
    own = {
        kind: {name: tensor for name, tensor in tensors.items() if name not in replaced}
        for kind, tensors in model.items()
    }
    _refuse_differences(path, pipeline, manifest, {source: own["weights"]}, replaced, settings)
    loaded = _read(path, pipeline, manifest, {source: list(own["weights"])})
    _refuse_untied(path, pipeline, loaded)
    _copy(dict.fromkeys(own, loaded[source]), own)
    return manifest


def _read_manifest(path: Path, pipeline: Pipeline, settings: Mapping[str, Any] | None = None) -> Manifest:
    """Read the manifest, and refuse another number of layers."""
    found: list[Manifest] = []
    together(pipeline, lambda: found.append(Manifest.read(path)))
    (manifest,) = found
    if manifest.num_layers != pipeline.num_layers:
        raise CheckpointError(
            f"{path} is of a model with {manifest.num_layers} layers, but this one has {pipeline.num_layers}"
            f"{_differing_settings(manifest, settings)}: {_BUILD_THAT}"
        )
    return manifest


def _refuse_differences(
    path: Path,
    pipeline: Pipeline,
    manifest: Manifest,
    own: Mapping[str, Mapping[str, Tensor]],
    ignored: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Raise CheckpointError, naming the layers of all stages that differ, unless all tensors fit."""
    layers = {int(key) for key in pipeline.layers}
    for kind, tensors in own.items():
        own_found = {
            name: how for name, how in differences(manifest, kind, tensors, layers).items() if name not in ignored
        }
        found = {name: how for part in pipeline.job.gather(own_found) for name, how in part.items()}
        if found:
            raise CheckpointError(
                f"{path} does not fit this model in its {kind}: {describe_differences(found)}"
                f"{_differing_settings(manifest, settings)}: {_BUILD_THAT}"
            )


def _differing_settings(manifest: Manifest, settings: Mapping[str, Any] | None) -> str:
    """Return which of the model's settings differ from those that the checkpoint was saved with."""
    saved = manifest.config.get("model", {})
    found = [
        f"model.{key} is {saved[key]} there, {value} here"
        for key, value in (settings or {}).items()
        if key in saved and saved[key] != value
    ]
    return f"; {', '.join(found)}" if found else ""


def _read(
    path: Path, pipeline: Pipeline, manifest: Manifest, names: Mapping[str, list[str]]
) -> dict[str, dict[str, Tensor]]:
    """Read the tensors called `names`, by kind, on every process."""
    loaded: list[dict[str, dict[str, Tensor]]] = []
    together(pipeline, lambda: loaded.append(read_layers(path, manifest, names)))
    return loaded[0]


def _refuse_partly_replaced(pipeline: Pipeline, replaced: Collection[str]) -> None:
    for names in pipeline.ties:
        loaded = [name for name in names if name not in replaced]
        if loaded and len(loaded) < len(names):
            (replaced_name, *_) = (name for name in names if name in replaced)
            raise CheckpointError(
                f"{loaded[0]} and {replaced_name} are one parameter of this model, of which only the second is to be "
                "replaced: replace both, or untie them."
            )


def _refuse_untied(path: Path, pipeline: Pipeline, loaded: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise CheckpointError, on all processes, where the copies of a tied parameter would get different values."""
    if not pipeline.ties:
        return
    tied = {name for names in pipeline.ties for name in names}
    own = {
        kind: {name: checksum(value) for name, value in tensors.items() if parameter_of(name) in tied}
        for kind, tensors in loaded.items()
    }
    found: dict[str, dict[str, int]] = {}
    for part in pipeline.job.gather(own):
        for kind, values in part.items():
            found.setdefault(kind, {}).update(values)
    for first, *others in pipeline.ties:
        for name in others:
            for kind, values in found.items():
                if _of(name, values) != _of(first, values):
                    raise CheckpointError(
                        f"{path} has different values for {first} and {name} in its {kind}, which are one parameter of "
                        f"this model: {_BUILD_THAT}"
                    )


def _of(name: str, values: Mapping[str, int]) -> dict[str, int]:
    """Return what belongs to a parameter: its value, or the slots of its optimiser state."""
    return {key.removeprefix(name): value for key, value in values.items() if parameter_of(key) == name}


@torch.no_grad()
def _copy(loaded: Mapping[str, Mapping[str, Tensor]], own: Mapping[str, Mapping[str, Tensor]]) -> None:
    for kind, tensors in own.items():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[kind][name])


def _own_entries(manifest: Manifest, pipeline: Pipeline) -> dict[str, TensorEntry]:
    """Return the optimiser's entries that belong to this process's layers."""
    entries = manifest.tensors.get("optimizer", {})
    return {name: entry for name, entry in entries.items() if str(layer_of(name)) in pipeline.layers}


def _check_optimizer(
    path: Path, manifest: Manifest, optimizer: OptimizerState, entries: Mapping[str, TensorEntry]
) -> None:
    """Refuse the state of another optimiser, or of parameters that this one does not train."""
    saved = manifest.optimizer
    if saved != optimizer.name:
        raise CheckpointError(
            f"{path} has the state of {saved or 'no optimiser'}, but this run uses {optimizer.name}: "
            "use that optimiser, or load the weights alone."
        )
    parameters = optimizer.parameters
    # A parameter may lack a state: before the first step, or where it never had a gradient.
    unexpected = [key for key in entries if parameter_of(key) not in parameters]
    if unexpected:
        raise CheckpointError(
            f"{path} has optimiser state {describe_names(unexpected)}, which this run does not train: "
            "train the same parameters, or load the weights alone."
        )
    for key, entry in entries.items():
        shape = tuple(parameters[parameter_of(key)].shape)
        if not _may_belong(entry.shape, shape):
            raise CheckpointError(
                f"{path} has {key} of shape {list(entry.shape)}, but the parameter's is {list(shape)}: "
                "build the model that it was saved with."
            )


def _may_belong(slot: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Say whether an optimiser may keep a tensor of this shape for a parameter: a number, or one for each row, too."""
    is_alike = len(slot) == len(parameter)
    return slot == () or (is_alike and all(own in (1, size) for own, size in zip(slot, parameter, strict=True)))
