"""One file of weights for the plain model, which whoever has safetensors can load."""

from pathlib import Path

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.file_image import FileImage
from gpipe.checkpoint.header import Form
from gpipe.checkpoint.layer_files import read_layers
from gpipe.checkpoint.manifest import Manifest
from gpipe.durable_files import replacing

_PREFIX = "layers."


def export(checkpoint: Path, output: Path, *, averages: bool = True) -> str:
    """Write the weights of a checkpoint, verified, as one safetensors file; return the kind: "ema" or "weights".

    The names are those of the plain nn.Sequential's state_dict: `<layer>.<name>`. So each layer has its copy of a tied
    parameter, as there. averages: take the moving averages where the checkpoint has them.
    Raises CheckpointError for a damaged checkpoint, FileExistsError where the output is there already.
    """
    if output.exists():
        raise FileExistsError(f"{output} is there already: remove it, or name another file with --output.")
    manifest = Manifest.read(checkpoint)
    kind = "ema" if averages and "ema" in manifest.tensors else "weights"
    entries = manifest.tensors.get(kind, {})
    if not entries:
        raise CheckpointError(f"{checkpoint} has no {kind}: choose another.")
    image = FileImage({_plain(name): Form(entry.dtype, entry.shape) for name, entry in entries.items()})
    for file in sorted({entry.file for entry in entries.values()}):  # one at a time: a model may be large
        names = [name for name, entry in entries.items() if entry.file == file]
        tensors = read_layers(checkpoint, manifest, {kind: names})[kind]
        image.copy({_plain(name): tensor for name, tensor in tensors.items()})
    with replacing(output) as partial:
        image.write(partial)
    return kind


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX)
