"""Read checkpoints: into a pipeline, into plain layers, into one file, or to verify them.

A reader opens only the files that have its layers, and verifies their hashes and headers first. If any process
finds a fault, CheckpointError is raised on all of them, and nothing has changed.
"""

import shutil
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gpipe.checkpoint.content import Kinds, OptimizerState
from gpipe.checkpoint.errors import CheckpointError, run_on_all
from gpipe.checkpoint.format import FileImage, TensorSpec, parse_layer, parse_parameter, read_specs
from gpipe.checkpoint.manifest import Manifest, Position, TensorEntry
from gpipe.durable_files import replacing
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.layers.initialization import materialize
from gpipe.pipeline.shared.tied_parameters import checksum

_BUILD_THAT = "build the model, with the settings, that it was saved with."
_NUM_NAMED = 3  # wrong tensors that a message names
_MODEL_FILE = "config.json"  # of a transformers model, in its run's folder


def load_checkpoint(path: Path, pipeline: Pipeline, model: Kinds, optimizer: OptimizerState | None = None) -> Manifest:
    """Load a checkpoint into this process's tensors, `model`, and into the optimiser if it is given.

    Every process calls this. The caller sets `pipeline.step` and the data's position from the manifest.

    Raises:
        CheckpointError: on all processes; the checkpoint is damaged, or is of another model or optimiser.
    """
    source = run_on_all(pipeline, lambda: _open(path))
    source.refuse_num_layers(pipeline.num_layers)
    if "ema" in model and "ema" not in source.manifest.tensors:
        raise CheckpointError(f"{path} has no moving averages, but this run keeps them: set ema.decay=null.")
    for kind, tensors in model.items():
        source.refuse_differences(kind, tensors, pipeline)
    names = {kind: list(tensors) for kind, tensors in model.items()}
    if optimizer is not None:
        entries = source.manifest.tensors.get("optimizer", {})
        names["optimizer"] = [name for name in entries if str(parse_layer(name)) in pipeline.layers]
        run_on_all(pipeline, lambda: source.refuse_optimizer(optimizer, names["optimizer"]))
    loaded = run_on_all(pipeline, lambda: source.read(names))
    source.refuse_untied(loaded, pipeline)
    _copy(loaded, model)
    if optimizer is not None:
        optimizer.load(loaded["optimizer"])
    return source.manifest


def load_weights(
    path: Path,
    pipeline: Pipeline,
    model: Kinds,
    *,
    replaced: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
    model_names: Mapping[str, str] | None = None,
) -> None:
    """Load the model that a checkpoint's run evaluated: its averages, or its weights if it has none.

    Every process calls this.

    Args:
        path: the checkpoint's folder; or a file that `export` wrote, or that has the model's own names.
        pipeline: the pipeline whose processes load together.
        model: this process's weights, statistics and, if this run keeps any, averages, which are overwritten.
        replaced: the names of tensors that stay as they are.
        settings: this model's settings, as JSON; if the layers differ, the message names the settings that differ.
        model_names: for a traced model, its own tensor names by the layers' names without "layers.".

    Raises:
        CheckpointError: on all processes; the checkpoint is damaged, or is of another model.
    """

    def open_source() -> _Source:
        if path.is_file():
            return _open_file(path, settings or {}, model_names or {}, pipeline.num_layers)
        return _recut(_open(path, settings), model_names, pipeline.num_layers)

    source = run_on_all(pipeline, open_source)
    source.refuse_num_layers(pipeline.num_layers)
    _refuse_partly_replaced(pipeline, replaced)
    kind = source.choose_kind()
    own = {
        name: {key: tensor for key, tensor in tensors.items() if key not in replaced} for name, tensors in model.items()
    }
    source.refuse_differences(kind, own["weights"], pipeline, replaced)
    loaded = run_on_all(pipeline, lambda: source.read({kind: list(own["weights"])}))
    source.refuse_untied(loaded, pipeline)
    _copy(dict.fromkeys(own, loaded[kind]), own)


def load_layers(path: Path, layers: nn.Sequential, *, averages: bool = True) -> Manifest:
    """Load a checkpoint's weights, in one process and without a pipeline, into layers on the meta device.

    The layers get tensors on the CPU, the moving averages of the weights if there are any and `averages` is True. Tied
    tensors become copies.

    Raises:
        CheckpointError: the checkpoint is damaged, or is of other layers; the layers are unchanged.
    """
    source = _open(path)
    source.refuse_num_layers(len(layers))
    kind, own = source.choose_kind(averages=averages), layers.state_dict(prefix="layers.")
    if found := source.compare(kind, own, range(len(layers))):
        raise source.misfit(kind, found)
    try:
        read = source.read({kind: list(own)})[kind]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the disk and its permissions.") from None
    for index, module in enumerate(layers.modules()):
        if module._non_persistent_buffers_set:  # no checkpoint has these buffers
            materialize(module, index, 0, torch.device("cpu"))
    # Assigned, not copied, so that the unneeded initial weights are never drawn. Cloned, because tensors in a mapped
    # file may have any address, and some kernels choose their order of summation by it.
    layers.load_state_dict({name.removeprefix("layers."): read[name].clone() for name in read}, assign=True)
    return source.manifest


def export(path: Path, output: Path, *, averages: bool = True) -> str:
    """Write a checkpoint's weights, verified, as one safetensors file that the plain model can load.

    The plain model is the nn.Sequential, or the model that was traced. A transformers model gets its config.json beside
    the file.

    As in the plain model, each layer has its copy of a tied parameter. With `averages`, the file has the moving
    averages of the weights if the checkpoint has them.

    Returns:
        The kind that was written: "ema" or "weights".

    Raises:
        CheckpointError: the checkpoint is damaged.
        FileExistsError: the output exists.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists: remove it, or name another file with --output.")
    source = _open(path)
    kind = source.choose_kind(averages=averages)
    entries, names = source.manifest.tensors.get(kind, {}), _choose_exported_names(source.manifest, kind)
    if not entries:
        raise CheckpointError(f"{path} has no {kind}: choose another.")
    is_traced = _read_model_names(source.manifest) is not None
    beside = path.parent.parent / _MODEL_FILE
    copied = output.parent / _MODEL_FILE if beside.is_file() and is_traced else None
    if copied is not None and copied.exists() and copied.read_bytes() != beside.read_bytes():
        raise FileExistsError(f"{copied} exists, and is another model's: name a file in another folder with --output.")
    # With hashes, such as the tokenizer's: `init_from` checks them.
    hashes = {name: value for name, value in source.manifest.config.items() if name.endswith("_sha256")}
    image = FileImage({exported: entries[name] for name, exported in names.items()}, metadata=hashes)
    for file in sorted({entries[name].file for name in names}):  # one at a time: a model may be large
        read = source.read({kind: [name for name in names if entries[name].file == file]})[kind]
        image.copy({names[name]: tensor for name, tensor in read.items()})
    output.parent.mkdir(parents=True, exist_ok=True)
    image.write(output)
    if copied is not None:
        with replacing(copied) as partial:
            shutil.copyfile(beside, partial)
    return kind


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a checkpoint, or of a file of weights, by the names that `export` gives them.

    Raises:
        CheckpointError: it is damaged.
    """
    if path.is_file():
        return {name: spec.shape for name, spec in read_specs(path).items()}
    manifest = Manifest.read(path)
    names = _choose_exported_names(manifest, "weights")
    return {exported: manifest.tensors["weights"][name].shape for name, exported in names.items()}


def find_damage(path: Path) -> list[str]:
    """Return a sentence per file of a checkpoint that is not what was saved; none if the checkpoint is good."""
    try:
        manifest = Manifest.read(path)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    found = []
    for name in sorted(manifest.files):
        try:
            manifest.check_file(path, name)
        except (CheckpointError, OSError) as error:
            found.append(str(error))
    return found


@dataclass(frozen=True)
class _Source:
    """Tensors to read, under the names that they have in this model; its methods raise CheckpointError.

    Attributes:
        path: a checkpoint's folder, or a file of weights.
        manifest: what there is, under the names here.
        settings: this model's settings, as JSON, for messages.
        names: names in the files, by names here, where the two may differ.
        saved: what verifies the files; None for a file of weights, whose header safetensors compares with its size.
    """

    path: Path
    manifest: Manifest
    settings: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    saved: Manifest | None = None

    def choose_kind(self, *, averages: bool = True) -> str:
        """Return "ema" if averages are wanted and present, else "weights"."""
        return "ema" if averages and "ema" in self.manifest.tensors else "weights"

    def read(self, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
        """Read the tensors called `names`, by kind, to the CPU; opens and verifies only the files that have them."""
        files: dict[str, list[tuple[str, str]]] = {}
        for kind, kind_names in names.items():
            for name in kind_names:
                files.setdefault(self.manifest.tensors[kind][name].file, []).append((kind, name))
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in names}
        for file, items in files.items():
            if self.saved is not None:
                self.saved.check_file(self.path, file)
            with safe_open(self.path.parent / file if self.saved is None else self.path / file, "pt") as reader:
                for kind, name in items:
                    tensors[kind][name] = reader.get_tensor(self.names.get(name, name))
        return tensors

    def refuse_num_layers(self, num_layers: int) -> None:
        """Refuse a model with another number of layers."""
        if self.manifest.num_layers != num_layers:
            raise CheckpointError(
                f"{self.path} is of a model with {self.manifest.num_layers} layers, but this one has {num_layers}"
                f"{self._compare_settings()}: {_BUILD_THAT}"
            )

    def refuse_differences(
        self, kind: str, own: Mapping[str, Tensor], pipeline: Pipeline, ignored: Collection[str] = ()
    ) -> None:
        """Refuse tensors of another model on all processes; the message names the layers of all stages that differ."""
        differing = self.compare(kind, own, {int(key) for key in pipeline.layers})
        parts = pipeline.job.gather({name: how for name, how in differing.items() if name not in ignored})
        if found := {name: how for part in parts for name, how in part.items()}:
            raise self.misfit(kind, found)

    def compare(self, kind: str, own: Mapping[str, Tensor], layers: Container[int]) -> dict[str, str]:
        """Return a few words per tensor of these layers that is missing, unexpected, or of another shape or dtype."""
        specs = {name: str(TensorSpec.of(name, tensor)) for name, tensor in own.items()}
        saved = self.manifest.tensors.get(kind, {})
        names = [*own, *(name for name in saved if name not in own and parse_layer(name) in layers)]
        pairs = {name: (str(saved.get(name, "not")), specs.get(name, "not")) for name in names}
        return {name: f"{there} there, {here} here" for name, (there, here) in pairs.items() if there != here}

    def misfit(self, kind: str, found: Mapping[str, str]) -> CheckpointError:
        """Return the error that names the layers that differ, and how the first of their tensors do."""
        layers = sorted({parse_layer(name) for name in found})
        names = sorted(found, key=parse_layer)  # a process's layers may not be contiguous
        examples = "; ".join(f"{name} is {found[name]}" for name in names[:_NUM_NAMED])
        more = f"; and {len(found) - _NUM_NAMED} more tensors" if len(found) > _NUM_NAMED else ""
        subject = f"layer {layers[0]} differs" if len(layers) == 1 else f"layers {', '.join(map(str, layers))} differ"
        return CheckpointError(
            f"{self.path} does not fit this model in its {kind}: {subject} ({examples}{more})"
            f"{self._compare_settings()}: {_BUILD_THAT}"
        )

    def refuse_optimizer(self, optimizer: OptimizerState, keys: Sequence[str]) -> None:
        """Refuse the state of another optimiser, or `keys` of parameters that this one does not train."""
        if self.manifest.optimizer != optimizer.name:
            raise CheckpointError(
                f"{self.path} has the state of {self.manifest.optimizer or 'no optimiser'}, but this run uses "
                f"{optimizer.name}: use that optimiser, or load the weights alone."
            )
        parameters = optimizer.parameters
        # A parameter may lack a state: before the first step, or if it never had a gradient.
        if unexpected := [key for key in keys if parse_parameter(key) not in parameters]:
            more = f" and {len(unexpected) - _NUM_NAMED} more" if len(unexpected) > _NUM_NAMED else ""
            raise CheckpointError(
                f"{self.path} has optimiser state {', '.join(unexpected[:_NUM_NAMED])}{more}, which this run does not "
                "train: train the same parameters, or load the weights alone."
            )
        for key in keys:
            slot, shape = self.manifest.tensors["optimizer"][key].shape, tuple(parameters[parse_parameter(key)].shape)
            # An optimiser may keep one number for a parameter, or one per row.
            if slot != () and (
                len(slot) != len(shape) or any(a not in (1, b) for a, b in zip(slot, shape, strict=True))
            ):
                raise CheckpointError(
                    f"{self.path} has {key} of shape {list(slot)}, but the parameter's is {list(shape)}: "
                    "build the model that it was saved with."
                )

    def refuse_untied(self, loaded: Kinds, pipeline: Pipeline) -> None:
        """Refuse, on all processes, different values for the copies of a tied parameter."""
        tied = {name for names in pipeline.ties for name in names}
        for kind, tensors in loaded.items() if tied else ():
            own = {key: checksum(value) for key, value in tensors.items() if parse_parameter(key) in tied}
            values: dict[str, dict[str, int]] = {}  # of each parameter, or of the slots of its optimiser state
            for key, value in (item for part in pipeline.job.gather(own) for item in part.items()):
                name = parse_parameter(key)
                values.setdefault(name, {})[key.removeprefix(name)] = value
            for first, *others in pipeline.ties:
                for name in others:
                    if values.get(name) != values.get(first):
                        raise CheckpointError(
                            f"{self.path} has different values for {first} and {name} in its {kind}, which are one "
                            f"parameter of this model: {_BUILD_THAT}"
                        )

    def _compare_settings(self) -> str:
        """Return which of the model's settings differ from those that the checkpoint was saved with."""
        saved = self.manifest.config.get("model", {})
        found = [
            f"model.{key} is {saved[key]} there, {value} here"
            for key, value in self.settings.items()
            if key in saved and saved[key] != value
        ]
        return f"; {', '.join(found)}" if found else ""


def _open(path: Path, settings: Mapping[str, Any] | None = None) -> _Source:
    manifest = Manifest.read(path)
    return _Source(path, manifest, settings or {}, saved=manifest)


def _open_file(path: Path, settings: Mapping[str, Any], model_names: Mapping[str, str], num_layers: int) -> _Source:
    """Open a file that `export` wrote, or that has the model's own names."""
    found = read_specs(path)
    if model_names:
        names = {f"layers.{own}": name for own, name in model_names.items() if name in found}
        if not names:
            raise CheckpointError(
                f"{path} has {next(iter(found), 'nothing')}, but the model calls its tensors "
                f"{', '.join(list(model_names.values())[:2])} and so on: name a file with the weights of this model."
            )
    else:
        if (foreign := next((name for name in found if not name.partition(".")[0].isdecimal()), None)) is not None:
            raise CheckpointError(
                f"{path} has the tensor {foreign}, which is not named like a layer's: it is of another model; "
                "name a file that was exported from a model like this one."
            )
        names = {f"layers.{name}": name for name in found}
    num_layers = max([num_layers, *(1 + parse_layer(name) for name in names)])  # the last may have no tensors
    entries = {own: TensorEntry(found[name].dtype, found[name].shape, path.name) for own, name in names.items()}
    return _Source(
        path, Manifest(Position(0, 0, 0, 0), num_layers, None, {}, {}, {}, {"weights": entries}), settings, names
    )


def _recut(source: _Source, model_names: Mapping[str, str] | None, num_layers: int) -> _Source:
    """Rename the tensors of a traced model, which may be cut elsewhere for images of another size."""
    saved_names = _read_model_names(source.manifest)
    if model_names is None or saved_names is None:
        return source
    places = {name: place for place, name in saved_names.items()}
    names = {f"layers.{own}": f"layers.{places[name]}" for own, name in model_names.items() if name in places}
    tensors = {
        kind: {own: entries[saved] for own, saved in names.items() if saved in entries}
        for kind, entries in source.manifest.tensors.items()
    }
    return replace(source, manifest=replace(source.manifest, num_layers=num_layers, tensors=tensors), names=names)


def _refuse_partly_replaced(pipeline: Pipeline, replaced: Collection[str]) -> None:
    for names in pipeline.ties:
        loaded = [name for name in names if name not in replaced]
        if loaded and len(loaded) < len(names):
            (replaced_name, *_) = (name for name in names if name in replaced)
            raise CheckpointError(
                f"{loaded[0]} and {replaced_name} are one parameter of this model, but only the second is to be "
                "replaced: replace both, or untie them."
            )


def _choose_exported_names(manifest: Manifest, kind: str) -> dict[str, str]:
    """Return the tensors' names in the traced model or, for other models, in the plain nn.Sequential.

    A tensor that several layers have is one in a traced model.
    """
    exported = {name: name.removeprefix("layers.") for name in manifest.tensors.get(kind, {})}
    names = _read_model_names(manifest)
    return exported if names is None else {name: names[own] for name, own in exported.items() if own in names}


def _read_model_names(manifest: Manifest) -> dict[str, str] | None:
    """Return the names of a traced model's tensors by the layers' names; None for other models."""
    names = manifest.config.get("model_names")
    if names is not None and not (isinstance(names, dict) and all(isinstance(name, str) for name in names.values())):
        raise CheckpointError("the model_names of the checkpoint do not map names to names: restore its manifest.json.")
    return names


@torch.no_grad()
def _copy(loaded: Kinds, own: Kinds) -> None:
    for kind, tensors in own.items():
        for name, tensor in tensors.items():
            tensor.copy_(loaded[kind][name])
