"""Checkpoints: folders of safetensors files under layer names, which any number of stages can read.

    checkpoints/
      latest                         the name of the newest folder, one line
      best                           the name of the one whose evaluation had the least loss
      step-00000120/
        manifest.json                position, config, and every file and tensor (manifest.py)
        weights-0.safetensors        layers.0.weight, layers.1.bias, ...    written by stage 0
        ema-0.safetensors            the same names
        optimizer-0.safetensors      layers.0.weight/square_avg, ...
        weights-1.safetensors        ...                                    written by stage 1

A checkpoint is written beside its place, flushed to the disk, and renamed: a folder of that name is complete.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gpipe.pipeline.engine import Pipeline
from gpipe.training.ema import Ema
from gpipe.training.layer_files import flush, write_layers
from gpipe.training.manifest import MANIFEST, CheckpointError, Manifest, Position
from gpipe.training.optimizers import optimizer_state

_FOLDER = re.compile(r"step-(\d{8,})")
_LATEST = "latest"
_BEST = "best"


def save_checkpoint(
    folder: Path,
    pipeline: Pipeline,
    position: Position,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    ema: Ema | None = None,
    config: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    keep: int = 3,
    is_best: bool = False,
) -> Path:
    """Save a checkpoint as `folder/step-<step>`, point `latest` to it, and delete all but the best and the newest.

    Every process calls it, with a `folder` that all see; each stage writes its own layers, replica 0 alone writes.
    `config` and `results` are JSON. keep: how many of the newest stay. is_best: point `best` to this one. Raises
    CheckpointError on every process of the replica if any cannot write.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, but at least 1 checkpoint must be kept.")
    path = folder / f"step-{position.step:08d}"
    if pipeline.replica_index != 0:
        return path
    partial = folder / f".{path.name}.partial"
    leads = pipeline.is_first
    together(pipeline, lambda: _make_empty(partial) if leads else None)
    written = together(pipeline, lambda: _write_own(partial, pipeline, optimizer, ema))
    manifest = Manifest(
        position=position,
        num_layers=pipeline.num_layers,
        optimizer=type(optimizer).__name__ if optimizer is not None else None,
        config=dict(config or {}),
        results=dict(results or {}),
    )
    for part in written:
        manifest.add(part)
    together(pipeline, lambda: _publish(partial, path, manifest, keep, is_best=is_best) if leads else None)
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` in `folder` names, or None where nothing was saved yet."""
    return _pointed(folder / _LATEST)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint whose main evaluation had the least loss, or None where none was saved after one."""
    return _pointed(folder / _BEST)


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that is meant: by its folder, by a pointer (`best`), or the latest of a run's folder."""
    if path.name in (_LATEST, _BEST) and path.is_file():
        return _pointed(path)
    for folder in (path / "checkpoints", path):
        if (newest := latest_checkpoint(folder)) is not None:
            return newest
    return path if (path / MANIFEST).exists() else None


def together(pipeline: Pipeline, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every process and return what each gave; where any failed, raise its error on all of them."""
    try:
        outcome = {"value": work()}
    except CheckpointError as error:
        outcome = {"error": str(error)}
    except (OSError, SafetensorError) as error:
        outcome = {"error": f"The checkpoint cannot be written or read ({error}): check the disk and its permissions."}
    outcomes = pipeline.gather(outcome)
    for other in outcomes:
        if "error" in other:
            raise CheckpointError(other["error"])
    return [other["value"] for other in outcomes]


def own_tensors(pipeline: Pipeline, ema: Ema | None) -> dict[str, dict[str, Tensor]]:
    """Return this process's weights, and averages if there are any, by kind and name, sharing their memory."""
    own: dict[str, dict[str, Tensor]] = {"weights": dict(pipeline.layers.state_dict(prefix="layers."))}
    if ema is not None:
        own["ema"] = ema.state()
    return own


def _write_own(
    partial: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, ema: Ema | None
) -> dict[str, Any]:
    """Write the files of the stages that this process plays; return their entries as JSON."""
    kinds = own_tensors(pipeline, ema)
    if optimizer is not None:
        kinds["optimizer"] = optimizer_state(optimizer)
    files, tensors = write_layers(partial, kinds, pipeline.partitions)
    return {
        "files": {name: asdict(entry) for name, entry in files.items()},
        "tensors": {kind: {name: asdict(entry) for name, entry in part.items()} for kind, part in tensors.items()},
    }


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(partial: Path, path: Path, manifest: Manifest, keep: int, *, is_best: bool) -> None:
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
    for name in (_LATEST, _BEST) if is_best else (_LATEST,):
        pointer = path.parent / f".{name}.partial"
        pointer.write_text(path.name + "\n", encoding="utf-8")
        flush(pointer)
        pointer.replace(path.parent / name)
    flush(path.parent)
    best = best_checkpoint(path.parent)
    saved = [(int(match[1]), other) for other in path.parent.iterdir() if (match := _FOLDER.fullmatch(other.name))]
    for _, other in sorted(saved)[:-keep]:
        if other not in (path, best):
            shutil.rmtree(other)


def _pointed(pointer: Path) -> Path | None:
    if not pointer.exists():
        return None
    name = pointer.read_text(encoding="utf-8").strip()
    if not _FOLDER.fullmatch(name):
        raise CheckpointError(f"{pointer} says {name!r}, which names no checkpoint: write a folder's name into it.")
    return pointer.parent / name
