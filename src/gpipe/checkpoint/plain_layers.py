"""The weights of a checkpoint in a plain sequence of layers, in one process, without a pipeline."""

from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.layer_files import describe_differences, differences, read_layers
from gpipe.checkpoint.manifest import Manifest

_BUILD_THAT = "build the model, with the settings, that it was saved with."


def load_layers(path: Path, layers: nn.Sequential, *, averages: bool = True) -> Manifest:
    """Give layers that are described on the meta device the tensors of a checkpoint, verified, on the CPU.

    averages: take the moving averages of the weights where the checkpoint has them. Tied tensors become copies.
    Raises CheckpointError where the checkpoint is damaged or of other layers; the layers are as before then.
    """
    manifest = Manifest.read(path)
    if manifest.num_layers != len(layers):
        raise CheckpointError(
            f"{path} is of a model with {manifest.num_layers} layers, but this one has {len(layers)}: {_BUILD_THAT}"
        )
    kind = "ema" if averages and "ema" in manifest.tensors else "weights"
    own = layers.state_dict(prefix="layers.")
    if found := differences(manifest, kind, own, range(len(layers))):
        raise CheckpointError(
            f"{path} does not fit this model in its {kind}: {describe_differences(found)}: {_BUILD_THAT}"
        )
    try:
        read = read_layers(path, manifest, {kind: list(own)})[kind]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the disk and its permissions.") from None
    # Assigned, not copied: the initial weights, which nothing needs, are never drawn.
    layers.load_state_dict({name.removeprefix("layers."): tensor for name, tensor in read.items()}, assign=True)
    return manifest
