"""Read checkpoints: into a pipeline, into plain layers, into one file, or to see whether they are good.

A reader opens only the files that have its layers, and verifies their sizes, hashes and headers first. All or nothing:
if a process finds a fault, CheckpointError is raised on all of them, and nothing has been changed.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gpipe.checkpoint.content import Kinds, OptimizerState
from gpipe.checkpoint.errors import CheckpointError, run_on_all
from gpipe.checkpoint.format import FileImage, TensorSpec, parse_layer, parse_parameter
from gpipe.checkpoint.manifest import Manifest, TensorEntry
from gpipe.durable_files import replacing
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.shared.tied_parameters import checksum

_BUILD_THAT = "build the model, with the settings, that it was saved with."
_NUM_NAMED = 3  # so many names of wrong tensors go into a message


def load_checkpoint(path: Path, pipeline: Pipeline, model: Kinds, optimizer: OptimizerState | None = None) -> Manifest:
    """Load a checkpoint into this process's tensors and, if it is given, into the optimiser.

    Every process calls this.

    Args:
        path: the checkpoint's folder.
        pipeline: whose processes load together.
        model: this process's tensors, which are overwritten.
        optimizer: None leaves the optimiser's state as it is.

    Returns:
        The manifest; from it, the caller sets `pipeline.step` and the data's position.

    Raises:
        CheckpointError: on all processes, if the checkpoint is damaged or of another model or optimiser.
    """
    manifest = _read_manifest(path, pipeline)
    if "ema" in model and "ema" not in manifest.tensors:
        raise CheckpointError(f"{path} has no moving averages, but this run keeps them: set ema.decay=null.")
    _refuse_differences(path, pipeline, manifest, model)
    names = {kind: list(tensors) for kind, tensors in model.items()}
    if optimizer is not None:
        entries = {
            name: entry
            for name, entry in manifest.tensors.get("optimizer", {}).items()
            if str(parse_layer(name)) in pipeline.layers
        }
        run_on_all(pipeline, lambda: _check_optimizer(path, manifest.optimizer, optimizer, entries))
        names["optimizer"] = list(entries)
    loaded = run_on_all(pipeline, lambda: _read_tensors(path, manifest, names))
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
    """Begin with the model that a checkpoint's run evaluated: with its averages, or its weights if it has none.

    Every process calls this.

    Args:
        path: the checkpoint's folder.
        pipeline: whose processes load together.
        model: this process's tensors, which are overwritten: weights, statistics and, if this run keeps any, averages.
        replaced: the names of tensors that stay as they are.
        settings: this model's, as JSON; if the layers differ, the message names the settings that do.

    Raises:
        CheckpointError: on all processes, if the checkpoint is damaged or of another model.
    """
    manifest = _read_manifest(path, pipeline, settings)
    _refuse_partly_replaced(pipeline, replaced)
    source = _choose_kind(manifest)
    own = {
        kind: {name: tensor for name, tensor in tensors.items() if name not in replaced}
        for kind, tensors in model.items()
    }
    _refuse_differences(path, pipeline, manifest, {source: own["weights"]}, replaced, settings)
    loaded = run_on_all(pipeline, lambda: _read_tensors(path, manifest, {source: list(own["weights"])}))
    _refuse_untied(path, pipeline, loaded)
    _copy(dict.fromkeys(own, loaded[source]), own)
    return manifest


def load_layers(path: Path, layers: nn.Sequential, *, averages: bool = True) -> Manifest:
    """Load a checkpoint, in one process and without a pipeline, into layers on the meta device.

    Args:
        path: the checkpoint's folder.
        layers: they get tensors on the CPU; tied tensors become copies.
        averages: take the moving averages of the weights if the checkpoint has them.

    Raises:
        CheckpointError: the checkpoint is damaged or of other layers; the layers are unchanged.
    """
    manifest = Manifest.read(path)
    _check_num_layers(path, manifest, len(layers))
    kind = _choose_kind(manifest, averages=averages)
    own = layers.state_dict(prefix="layers.")
    if found := _find_differences(manifest, kind, own, range(len(layers))):
        raise _misfit(path, manifest, kind, found)
    try:
        read = _read_tensors(path, manifest, {kind: list(own)})[kind]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the disk and its permissions.") from None
    # Assigned, not copied: the initial weights, which nothing needs, are never drawn.
    layers.load_state_dict({_plain(name): tensor for name, tensor in read.items()}, assign=True)
    return manifest


def export(checkpoint: Path, output: Path, *, averages: bool = True) -> str:
    """Write the weights of a checkpoint, verified, as one safetensors file that the plain model can load.

    The names are those of the plain nn.Sequential's state_dict, `<layer>.<name>`; as there, each layer has its copy of
    a tied parameter.

    Args:
        checkpoint: its folder.
        output: the file, which must not exist.
        averages: take the moving averages of the weights if the checkpoint has them.

    Returns:
        The kind that was written: "ema" or "weights".

    Raises:
        CheckpointError: the checkpoint is damaged.
        FileExistsError: the output exists.
    """
    if output.exists():
        raise FileExistsError(f"{output} is there already: remove it, or name another file with --output.")
    manifest = Manifest.read(checkpoint)
    kind = _choose_kind(manifest, averages=averages)
    entries = manifest.tensors.get(kind, {})
    if not entries:
        raise CheckpointError(f"{checkpoint} has no {kind}: choose another.")
    image = FileImage({_plain(name): entry.spec for name, entry in entries.items()})
    for file in sorted({entry.file for entry in entries.values()}):  # one at a time: a model may be large
        names = [name for name, entry in entries.items() if entry.file == file]
        tensors = _read_tensors(checkpoint, manifest, {kind: names})[kind]
        image.copy({_plain(name): tensor for name, tensor in tensors.items()})
    with replacing(output) as partial:
        image.write(partial)
    return kind


def find_damage(checkpoint: Path) -> list[str]:
    """Return a sentence per file of a checkpoint that is not what was saved; none if the checkpoint is good."""
    try:
        manifest = Manifest.read(checkpoint)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    found = []
    for name in sorted(manifest.files):
        try:
            manifest.check_file(checkpoint, name)
        except (CheckpointError, OSError) as error:
            found.append(str(error))
    return found


def _plain(name: str) -> str:
    """Return the name that a tensor has in the plain nn.Sequential."""
    return name.removeprefix("layers.")


def _choose_kind(manifest: Manifest, *, averages: bool = True) -> str:
    return "ema" if averages and "ema" in manifest.tensors else "weights"


def _read_tensors(path: Path, manifest: Manifest, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
    """Read the tensors called `names`, by kind, to the CPU; opens and verifies only the files that have them."""
    files: dict[str, list[tuple[str, str]]] = {}
    for kind, kind_names in names.items():
        for name in kind_names:
            files.setdefault(manifest.tensors[kind][name].file, []).append((kind, name))
    for file in files:
        manifest.check_file(path, file)
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in names}
    for file, items in files.items():
        with safe_open(path / file, framework="pt", device="cpu") as reader:
            for kind, name in items:
                tensors[kind][name] = reader.get_tensor(name)
    return tensors


@torch.no_grad()
def _copy(loaded: Mapping[str, Mapping[str, Tensor]], own: Kinds) -> None:
    for kind, tensors in own.items():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[kind][name])


def _read_manifest(path: Path, pipeline: Pipeline, settings: Mapping[str, Any] | None = None) -> Manifest:
    manifest = run_on_all(pipeline, lambda: Manifest.read(path))
    _check_num_layers(path, manifest, pipeline.num_layers, settings)
    return manifest


def _check_num_layers(
    path: Path, manifest: Manifest, num_layers: int, settings: Mapping[str, Any] | None = None
) -> None:
    if manifest.num_layers != num_layers:
        raise CheckpointError(
            f"{path} is of a model with {manifest.num_layers} layers, but this one has {num_layers}"
            f"{_compare_settings(manifest, settings)}: {_BUILD_THAT}"
        )


def _refuse_differences(
    path: Path,
    pipeline: Pipeline,
    manifest: Manifest,
    own: Kinds,
    ignored: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Raise CheckpointError, naming the layers of all stages that differ, unless all tensors fit."""
    layers = {int(key) for key in pipeline.layers}
    for kind, tensors in own.items():
        own_found = _find_differences(manifest, kind, tensors, layers)
        own_found = {name: how for name, how in own_found.items() if name not in ignored}
        if found := {name: how for part in pipeline.gather(own_found) for name, how in part.items()}:
            raise _misfit(path, manifest, kind, found, settings)


def _find_differences(
    manifest: Manifest, kind: str, own: Mapping[str, Tensor], layers: Container[int]
) -> dict[str, str]:
    """Compare `own` tensors with those of one kind that a checkpoint has for the same `layers`.

    Returns:
        A few words per name that is missing, unexpected or of another shape or dtype.
    """
    saved = manifest.tensors.get(kind, {})
    found: dict[str, str] = {}
    for name, tensor in own.items():
        here = TensorSpec.of(name, tensor)
        if name not in saved:
            found[name] = f"not there, {here} here"
        elif saved[name].spec != here:
            found[name] = f"{saved[name]} there, {here} here"
    for name, entry in saved.items():
        if name not in own and parse_layer(name) in layers:
            found[name] = f"{entry} there, not here"
    return found


def _misfit(
    path: Path, manifest: Manifest, kind: str, found: Mapping[str, str], settings: Mapping[str, Any] | None = None
) -> CheckpointError:
    """Return the error that names the layers that differ, and how the first of their tensors do."""
    layers = sorted({parse_layer(name) for name in found})
    ordered = sorted(found.items(), key=lambda item: parse_layer(item[0]))  # a process's layers may lie apart
    examples = "; ".join(f"{name} is {how}" for name, how in ordered[:_NUM_NAMED])
    more = f"; and {len(found) - _NUM_NAMED} more tensors" if len(found) > _NUM_NAMED else ""
    subject = f"layer {layers[0]} differs" if len(layers) == 1 else f"layers {', '.join(map(str, layers))} differ"
    return CheckpointError(
        f"{path} does not fit this model in its {kind}: {subject} ({examples}{more})"
        f"{_compare_settings(manifest, settings)}: {_BUILD_THAT}"
    )


def _compare_settings(manifest: Manifest, settings: Mapping[str, Any] | None) -> str:
    """Return which of the model's settings differ from those that the checkpoint was saved with."""
    saved = manifest.config.get("model", {})
    found = [
        f"model.{key} is {saved[key]} there, {value} here"
        for key, value in (settings or {}).items()
        if key in saved and saved[key] != value
    ]
    return f"; {', '.join(found)}" if found else ""


def _check_optimizer(
    path: Path, saved: str | None, optimizer: OptimizerState, entries: Mapping[str, TensorEntry]
) -> None:
    """Refuse the state of another optimiser, or of parameters that this one does not train."""
    if saved != optimizer.name:
        raise CheckpointError(
            f"{path} has the state of {saved or 'no optimiser'}, but this run uses {optimizer.name}: "
            "use that optimiser, or load the weights alone."
        )
    parameters = optimizer.parameters
    # A parameter may lack a state: before the first step, or if it never had a gradient.
    if unexpected := [key for key in entries if parse_parameter(key) not in parameters]:
        more = f" and {len(unexpected) - _NUM_NAMED} more" if len(unexpected) > _NUM_NAMED else ""
        raise CheckpointError(
            f"{path} has optimiser state {', '.join(unexpected[:_NUM_NAMED])}{more}, which this run does not train: "
            "train the same parameters, or load the weights alone."
        )
    for key, entry in entries.items():
        shape = tuple(parameters[parse_parameter(key)].shape)
        # An optimiser may keep one number for a parameter, or one per row.
        is_alike = len(entry.shape) == len(shape) and all(
            slot in (1, size) for slot, size in zip(entry.shape, shape, strict=True)
        )
        if entry.shape != () and not is_alike:
            raise CheckpointError(
                f"{path} has {key} of shape {list(entry.shape)}, but the parameter's is {list(shape)}: "
                "build the model that it was saved with."
            )


def _refuse_partly_replaced(pipeline: Pipeline, replaced: Collection[str]) -> None:
    for names in pipeline.ties:
        loaded = [name for name in names if name not in replaced]
        if loaded and len(loaded) < len(names):
            (replaced_name, *_) = (name for name in names if name in replaced)
            raise CheckpointError(
                f"{loaded[0]} and {replaced_name} are one parameter of this model, of which only the second is to be "
                "replaced: replace both, or untie them."
            )


def _refuse_untied(path: Path, pipeline: Pipeline, loaded: Kinds) -> None:
    """Raise CheckpointError, on all processes, if the copies of a tied parameter would get different values."""
    if not pipeline.ties:
        return
    tied = {name for names in pipeline.ties for name in names}
    own = {
        kind: {name: checksum(value) for name, value in tensors.items() if parse_parameter(name) in tied}
        for kind, tensors in loaded.items()
    }
    parts = pipeline.gather(own)
    for kind in loaded:
        values = {name: value for part in parts for name, value in part[kind].items()}
        for first, *others in pipeline.ties:
            for name in others:
                if _select(name, values) != _select(first, values):
                    raise CheckpointError(
                        f"{path} has different values for {first} and {name} in its {kind}, which are one parameter of "
                        f"this model: {_BUILD_THAT}"
                    )


def _select(name: str, values: Mapping[str, int]) -> dict[str, int]:
    """Return what belongs to a parameter: its value, or the slots of its optimiser state."""
    return {key.removeprefix(name): value for key, value in values.items() if parse_parameter(key) == name}
