"""The tensors of layers, found in a checkpoint's files by layer, not by stage, and compared with those of a model."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from gpipe.checkpoint.entries import TensorEntry
from gpipe.checkpoint.errors import DamagedCheckpoint
from gpipe.checkpoint.header import form_of
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.names import NUM_NAMED, layer_of


def read_layers(folder: Path, manifest: Manifest, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
    """Read the tensors called `names`, by kind, to the CPU; opens and verifies only the files that have them."""
    wanted: dict[str, list[tuple[str, str, TensorEntry]]] = {}
    for kind, kind_names in names.items():
        for name in kind_names:
            entry = manifest.tensors[kind][name]
            wanted.setdefault(entry.file, []).append((kind, name, entry))
    for file in wanted:
        manifest.check_file(folder, file)
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in names}
    for file, items in wanted.items():
        with safe_open(folder / file, framework="pt", device="cpu") as reader:
            for kind, name, entry in items:
                tensor = reader.get_tensor(name)
                if (found := form_of(name, tensor)) != entry.form:
                    raise DamagedCheckpoint(f"{folder / file} has {name} as {found}, not {entry}: choose another.")
                tensors[kind][name] = tensor
    return tensors


def differences(manifest: Manifest, kind: str, own: Mapping[str, Tensor], layers: Container[int]) -> dict[str, str]:
    """Compare `own` tensors with those of one kind that a checkpoint has for the same `layers`.

    Returns, for each name that is missing, unexpected or of another shape or dtype, a few words that say so.
    """
    saved = manifest.tensors.get(kind, {})
    found: dict[str, str] = {}
    for name, tensor in own.items():
        here = form_of(name, tensor)
        if name not in saved:
            found[name] = f"not there, {here} here"
        elif saved[name].form != here:
            found[name] = f"{saved[name]} there, {here} here"
    for name, entry in saved.items():
        if name not in own and layer_of(name) in layers:
            found[name] = f"{entry} there, not here"
    return found


def describe_differences(found: Mapping[str, str]) -> str:
    """Say in a few words which layers differ, and how the first of their tensors do."""
    layers = sorted({layer_of(name) for name in found})
    ordered = sorted(found.items(), key=lambda item: layer_of(item[0]))  # a process's layers may lie apart
    examples = "; ".join(f"{name} is {how}" for name, how in ordered[:NUM_NAMED])
    more = f"; and {len(found) - NUM_NAMED} more tensors" if len(found) > NUM_NAMED else ""
    subject = f"layer {layers[0]} differs" if len(layers) == 1 else f"layers {', '.join(map(str, layers))} differ"
    return f"{subject} ({examples}{more})"
