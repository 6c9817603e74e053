"""Inspect a checkpoint: python -m gpipe.checkpoint verify|describe|export PATH.

PATH is a checkpoint's folder, a run's folder (for its latest checkpoint), a folder of runs (for the finished run that
saved last, else the unfinished one), or a pointer such as checkpoints/best.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.folder import find_checkpoint
from gpipe.checkpoint.format import parse_layer
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.read import export, find_damage
from gpipe.checkpoint.stale_statistics import describe_stale_statistics


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Returns:
        The exit status: 0, or 1 if the checkpoint is damaged or missing.
    """
    options = _make_parser().parse_args(arguments)
    try:
        checkpoint = find_checkpoint(options.path)
        if checkpoint is None:
            raise CheckpointError(f"{options.path} has no checkpoint: name a run's folder or a checkpoint's.")
        match options.command:
            case "verify":
                found = find_damage(checkpoint)
                print("\n".join(found) if found else f"{checkpoint}: ok")
                return 1 if found else 0
            case "describe":
                print("\n".join(describe(checkpoint)))
            case "export":
                output = options.output or Path(f"{checkpoint.name}.safetensors")
                if output.suffix != ".safetensors":  # init_from and other libraries recognise it by this
                    raise CheckpointError(f"--output is {output}, expected a name that ends with .safetensors.")
                kind = export(checkpoint, output, averages=not options.weights)
                what = "moving averages of the weights" if kind == "ema" else "weights"
                print(f"{output}: the {what} of {checkpoint}")
                if (stale := describe_stale_statistics(checkpoint, Manifest.read(checkpoint), kind)) is not None:
                    print(f"warning: {stale}", file=sys.stderr)
    except (CheckpointError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def describe(checkpoint: Path) -> Iterator[str]:
    """Yield the lines of a description: position, settings, layers, tensors and sizes, from the manifest alone."""
    manifest = Manifest.read(checkpoint)
    position = manifest.position
    yield f"{checkpoint}"
    yield f"step       {position.step}: mini-batch {position.batch} of epoch {position.epoch}, seed {position.seed}"
    for section, value in _select_settings(manifest.config).items():
        yield f"{section:<10} {value}"
    yield f"optimizer  {manifest.optimizer or 'not saved'}"
    layers: dict[int, list[int]] = {}
    for kind, entries in manifest.tensors.items():
        size = sum(entry.num_bytes for entry in entries.values())
        files = {entry.file for entry in entries.values()}
        yield f"{kind:<10} {len(entries)} tensors, {_format_size(size)}, in {len(files)} files"
        for name, entry in entries.items():
            layers.setdefault(parse_layer(name), []).append(entry.num_bytes)
    yield f"files      {_format_size(sum(entry.size for entry in manifest.files.values()))}"
    yield f"layers     {manifest.num_layers}"
    for layer, sizes in sorted(layers.items()):
        yield f"  {layer:<8} {len(sizes)} tensors, {_format_size(sum(sizes))}"


def _select_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that identify the run, as JSON, which cannot move the terminal's cursor."""
    found = {"run": json.dumps(config["name"])} if "name" in config else {}
    data = config.get("data")
    if isinstance(data, dict) and "name" in data:
        found["data"] = json.dumps(data["name"])
    model = config.get("model")
    if isinstance(model, dict):
        found["model"] = ", ".join(f"{json.dumps(key)[1:-1]} {json.dumps(value)}" for key, value in model.items())
    return found


def _format_size(num_bytes: int) -> str:
    """Return a size with its unit: 1.5 MiB."""
    units = "bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(units) - 1)
    return f"{num_bytes / 1024**power:.1f} {units[power]}" if power else f"{num_bytes} bytes"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpipe.checkpoint", description="Inspect a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "verify": "compare every file with its size, hash and tensors; print ok, or one line per damaged file",
        "describe": "print the step, the settings, and the layers with their tensors and sizes",
        "export": "write one safetensors file for the plain nn.Sequential, timm.create_model or from_pretrained",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "path", type=Path, help="a checkpoint's folder, a run's, a folder of runs, or checkpoints/best"
        )
        if name == "export":
            command.add_argument("--output", type=Path, help="the file; default: <checkpoint>.safetensors here")
            command.add_argument("--weights", action="store_true", help="the weights, even if there are averages")
    return parser


if __name__ == "__main__":
    sys.exit(main())
