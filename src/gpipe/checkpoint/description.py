"""What a checkpoint is, in a page, and whether it is what was saved."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.names import layer_of, parameter_of

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def damages(checkpoint: Path) -> list[str]:
    """Return a sentence for each file of a checkpoint that is not what was saved; none where it is good."""
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


def describe(checkpoint: Path) -> Iterator[str]:
    """Yield the lines of a description: position, settings, layers, tensors and sizes, from the manifest alone."""
    manifest = Manifest.read(checkpoint)
    position = manifest.position
    yield f"{checkpoint}"
    yield f"step       {position.step}: mini-batch {position.batch} of epoch {position.epoch}, seed {position.seed}"
    for section, value in _essentials(manifest.config).items():
        yield f"{section:<10} {value}"
    yield f"optimizer  {manifest.optimizer or 'not saved'}"
    for kind, entries in manifest.tensors.items():
        size = sum(entry.num_bytes for entry in entries.values())
        files = {entry.file for entry in entries.values()}
        yield f"{kind:<10} {len(entries)} tensors, {readable(size)}, in {len(files)} files"
    yield f"files      {readable(sum(entry.size for entry in manifest.files.values()))}"
    yield f"layers     {manifest.num_layers}"
    for layer, (num_tensors, size) in _layers(manifest).items():
        yield f"  {layer:<8} {num_tensors} tensors, {readable(size)}"


def readable(num_bytes: int) -> str:
    """Return a size with its unit: 1.5 MiB."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} bytes"


def _essentials(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what of the settings says which run it was; as JSON, which cannot move the terminal's cursor."""
    found = {"run": json.dumps(config["name"])} if "name" in config else {}
    data = config.get("data")
    if isinstance(data, dict) and "name" in data:
        found["data"] = json.dumps(data["name"])
    model = config.get("model")
    if isinstance(model, dict):
        found["model"] = ", ".join(f"{json.dumps(key)[1:-1]} {json.dumps(value)}" for key, value in model.items())
    return found


def _layers(manifest: Manifest) -> dict[int, tuple[int, int]]:
    """Return of each layer with tensors how many it has, of all kinds, and their bytes."""
    found: dict[int, tuple[int, int]] = {}
    for entries in manifest.tensors.values():
        for name, entry in entries.items():
            layer = layer_of(parameter_of(name))
            count, size = found.get(layer, (0, 0))
            found[layer] = count + 1, size + entry.num_bytes
    return dict(sorted(found.items()))
