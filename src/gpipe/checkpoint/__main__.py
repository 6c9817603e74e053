"""Look at a checkpoint: python -m gpipe.checkpoint verify|describe|export PATH.

PATH is a checkpoint's folder, a run's folder (its latest checkpoint is meant), or a pointer such as checkpoints/best.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from gpipe.checkpoint.description import damages, describe
from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.export import export
from gpipe.checkpoint.folder import find_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status: 0, or 1 where a checkpoint is damaged or not there."""
    options = _parser().parse_args(arguments)
    try:
        checkpoint = find_checkpoint(options.path)
        if checkpoint is None:
            raise CheckpointError(f"{options.path} has no checkpoint: name a run's folder or a checkpoint's.")
        match options.command:
            case "verify":
                return _verify(checkpoint)
            case "describe":
                print("\n".join(describe(checkpoint)))
            case "export":
                output = options.output or Path(f"{checkpoint.name}.safetensors")
                kind = export(checkpoint, output, averages=not options.weights)
                what = "moving averages of the weights" if kind == "ema" else "weights"
                print(f"{output}: the {what} of {checkpoint}")
    except (CheckpointError, OSError, SafetensorError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _verify(checkpoint: Path) -> int:
    found = damages(checkpoint)
    print("\n".join(found) if found else f"{checkpoint}: ok")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpipe.checkpoint", description="Look at a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "verify": "compare every file with its size, hash and tensors; print ok, or each damaged file",
        "describe": "print the step, the settings, and the layers with their tensors and sizes",
        "export": "write one safetensors file for the plain nn.Sequential, or timm.create_model",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", type=Path, help="a checkpoint's folder, a run's, or a pointer: checkpoints/best")
        if name == "export":
            command.add_argument("--output", type=Path, help="the file; default: <checkpoint>.safetensors here")
            command.add_argument("--weights", action="store_true", help="the weights, though there are averages")
    return parser


if __name__ == "__main__":
    sys.exit(main())
