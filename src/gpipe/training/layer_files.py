"""The tensors of layers in safetensors files: one file a kind and stage, found again by layer, not by stage."""

import os
import re
from collections.abc import Container, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpipe.training.manifest import CheckpointError, FileEntry, Manifest, TensorEntry, describe_file

_LAYER_NAME = re.compile(r"layers\.(\d+)\..+")
_NUM_NAMED = 3  # so many names of wrong tensors go into a message

Kinds = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind ("weights", "ema", "optimizer") and name."""


def layer_of(name: str) -> int:
    """Return the index of the layer that a tensor called `layers.<i>.<name>` belongs to."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"The tensor name {name!r} is not of the form layers.<i>.<name>: rename it.")
    return int(match[1])


def write_layers(
    folder: Path, kinds: Kinds, partitions: Sequence[int]
) -> tuple[dict[str, FileEntry], dict[str, dict[str, TensorEntry]]]:
    """Write tensors as `<kind>-<stage>.safetensors` and flush them to the disk; return the manifest's entries.

    `partitions` are the numbers of layers of all stages; a stage without tensors here gets no file.
    """
    files: dict[str, FileEntry] = {}
    entries: dict[str, dict[str, TensorEntry]] = {}
    for kind, tensors in kinds.items():
        for stage, (start, stop) in enumerate(pairwise(accumulate(partitions, initial=0))):
            part = {name: value for name, value in tensors.items() if start <= layer_of(name) < stop}
            if not part:
                continue
            path = folder / f"{kind}-{stage}.safetensors"
            try:
                save_file(_separate(part), path)
            except SafetensorError as error:  # of a full disk, which does not say where
                raise CheckpointError(f"{path} cannot be written ({error}): make room on the disk.") from None
            flush(path)
            files[path.name] = describe_file(path)
            for name, value in part.items():
                entries.setdefault(kind, {})[name] = TensorEntry(path.name, _dtype_name(value), tuple(value.shape))
    return files, entries


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_layers(folder: Path, manifest: Manifest, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
    """Read the tensors called `names`, by kind, to the CPU; opens and verifies only the files that have them."""
    wanted: dict[str, list[tuple[str, str, TensorEntry]]] = {}
    for kind, kind_names in names.items():
        for name in kind_names:
            entry = manifest.tensors[kind][name]
            wanted.setdefault(entry.file, []).append((kind, name, entry))
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in names}
    for file, items in wanted.items():
        manifest.check_file(folder, file)
        with safe_open(folder / file, framework="pt", device="cpu") as reader:
            for kind, name, entry in items:
                tensor = reader.get_tensor(name)
                if tuple(tensor.shape) != entry.shape or _dtype_name(tensor) != entry.dtype:
                    raise CheckpointError(f"{folder / file} disagrees with its manifest on {name}: choose another.")
                tensors[kind][name] = tensor
    return tensors


def differences(manifest: Manifest, kind: str, own: Mapping[str, Tensor], layers: Container[int]) -> dict[str, str]:
    """Compare `own` tensors with those of one kind that a checkpoint has for the same `layers`.

    Returns, for each name that is missing, unexpected or of another shape or dtype, a few words that say so.
    """
    saved = manifest.tensors.get(kind, {})
    found: dict[str, str] = {}
    for name, tensor in own.items():
        here = _form(_dtype_name(tensor), tensor.shape)
        if name not in saved:
            found[name] = f"not there, {here} here"
        elif (there := _form(saved[name].dtype, saved[name].shape)) != here:
            found[name] = f"{there} there, {here} here"
    for name, entry in saved.items():
        if name not in own and layer_of(name) in layers:
            found[name] = f"{_form(entry.dtype, entry.shape)} there, not here"
    return found


def describe_differences(found: Mapping[str, str]) -> str:
    """Say in a few words which layers differ, and how the first of their tensors do."""
    layers = sorted({layer_of(name) for name in found})
    ordered = sorted(found.items(), key=lambda item: layer_of(item[0]))  # a process's layers may lie apart
    examples = "; ".join(f"{name} is {how}" for name, how in ordered[:_NUM_NAMED])
    more = f"; and {len(found) - _NUM_NAMED} more tensors" if len(found) > _NUM_NAMED else ""
    subject = f"layer {layers[0]} differs" if len(layers) == 1 else f"layers {', '.join(map(str, layers))} differ"
    return f"{subject} ({examples}{more})"


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring tensors to the CPU; copy those that share memory (tied weights), which safetensors refuses."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in tensors.items():
        value = value.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        separate[name] = value.clone() if storage in seen else value
        seen.add(storage)
    return separate


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _form(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def describe_names(names: Sequence[str]) -> str:
    """List the first few names and count the rest, for a message."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
