"""Save a checkpoint: each stage its own layers, the first one the rest."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpipe.checkpoint.agreement import together
from gpipe.checkpoint.layer_files import flush, write_layers
from gpipe.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, Position
from gpipe.checkpoint.state import Kinds, OptimizerState
from gpipe.pipeline.engine import Pipeline

_FOLDER = re.compile(r"step-(\d{8,})")
_LATEST = "latest"


def save_checkpoint(
    folder: Path,
    pipeline: Pipeline,
    position: Position,
    model: Kinds,
    *,
    optimizer: OptimizerState | None = None,
    config: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Save a checkpoint as `folder/step-<step>`, point `latest` to it, and delete all but the newest `keep`.

    Every process calls it, with a `folder` that all see; each stage writes its own layers, replica 0 alone writes.
    `config` and `results` are JSON. Raises CheckpointError on every process of the replica if any cannot write.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, but at least 1 checkpoint must be kept.")
    path = folder / f"step-{position.step:08d}"
    if pipeline.replica_index != 0:
        return path
    partial = folder / f".{path.name}.partial"
    leads = pipeline.is_first
    together(pipeline, lambda: _make_empty(partial) if leads else None)
    written = together(pipeline, lambda: _write_own(partial, pipeline, model, optimizer))
    manifest = Manifest(
        position=position,
        num_layers=pipeline.num_layers,
        optimizer=optimizer.name if optimizer is not None else None,
        config=dict(config or {}),
        results=dict(results or {}),
    )
    for part in written:
        manifest.add(part)
    together(pipeline, lambda: _publish(partial, path, manifest, keep) if leads else None)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` in `folder` names, or None where nothing was saved yet."""
    pointer = folder / _LATEST
    if not pointer.exists():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    if not _FOLDER.fullmatch(name):
        raise CheckpointError(f"{pointer} says {name!r}, which names no checkpoint: write a folder's name into it.")
    return folder / name


def _write_own(partial: Path, pipeline: Pipeline, model: Kinds, optimizer: OptimizerState | None) -> dict[str, Any]:
    """Write the files of the stages that this process plays; return their entries as JSON."""
    kinds = dict(model)
    if optimizer is not None:
        kinds["optimizer"] = optimizer.read()
    files, tensors = write_layers(partial, kinds, pipeline.partitions)
    return {
        "files": {name: asdict(entry) for name, entry in files.items()},
        "tensors": {kind: {name: asdict(entry) for name, entry in part.items()} for kind, part in tensors.items()},
    }


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(partial: Path, path: Path, manifest: Manifest, keep: int) -> None:
    """Give a written checkpoint its manifest and its name, make it the latest, and delete the oldest."""
    (partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    flush(partial / MANIFEST)
    flush(partial)
    old = path.parent / f".{path.name}.old"
    if path.exists():  # the run went back to an earlier step and came here again
        path.rename(old)
    partial.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    pointer = path.parent / f".{_LATEST}.partial"
    pointer.write_text(path.name + "\n", encoding="utf-8")
    flush(pointer)
    pointer.replace(path.parent / _LATEST)
    flush(path.parent)
    saved = [(int(match[1]), other) for other in path.parent.iterdir() if (match := _FOLDER.fullmatch(other.name))]
    for _, other in sorted(saved)[:-keep]:
        if other != path:
            shutil.rmtree(other)
