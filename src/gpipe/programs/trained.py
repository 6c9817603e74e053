"""Find trained models by their checkpoints, and load translation models."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.read import load_layers
from gpipe.config import ConfigError, RunConfig, TranslationDataConfig, TranslationModelConfig
from gpipe.config.saved import from_plain
from gpipe.data import Tokenizer, open_tokenizer
from gpipe.programs.build import build_layers
from gpipe.programs.chosen_checkpoint import choose_checkpoint
from gpipe.programs.workloads.text_workload import TOKENIZER_FILE


@dataclass(frozen=True)
class TrainedModel:
    """A trained translation model, on one device.

    Attributes:
        run: the settings that it was trained with.
        data: the settings of its data.
        checkpoint: the checkpoint's folder.
        step: the number of updates.
    """

    run: RunConfig
    data: TranslationDataConfig
    layers: nn.Sequential
    tokenizer: Tokenizer
    checkpoint: Path
    step: int


def open_trained(checkpoint: str, device: torch.device) -> TrainedModel:
    """Load the model of a checkpoint, a run (its best checkpoint) or a folder of runs (see `find_run`).

    The moving averages of the weights are loaded if there are any.

    Raises:
        ConfigError: there is no checkpoint, it is of another family of models, or the model was trained with another
            tokenizer.
        CheckpointError: it is damaged.
    """
    path, manifest = find_trained(checkpoint, TranslationModelConfig.family)
    run = from_plain(manifest.config)
    assert isinstance(run.data, TranslationDataConfig)
    tokenizer = _find_tokenizer(path, run.data)
    trained_with = manifest.config.get("tokenizer_sha256")
    if trained_with not in (None, tokenizer.sha256):
        raise ConfigError(
            f"the tokenizer {tokenizer.path} has the SHA-256 {tokenizer.sha256[:12]}..., but {path} was trained with "
            f"{trained_with[:12]}...: put that tokenizer there."
        )
    layers = build_layers(run)
    load_layers(path, layers)
    return TrainedModel(run, run.data, layers.to(device).eval(), tokenizer, path, manifest.position.step)


def find_trained(checkpoint: str, *families: str) -> tuple[Path, Manifest]:
    """Return the folder of a checkpoint of one of some families of models, and its manifest."""
    path = choose_checkpoint("checkpoint", checkpoint)
    manifest = Manifest.read(path)
    if (found := manifest.config.get("model", {}).get("family")) not in families:
        raise ConfigError(
            f"checkpoint is {checkpoint}, which has a model of the family {found}, expected {' or '.join(families)}: "
            "name a run that trained such a model."
        )
    return path, manifest


def _find_tokenizer(checkpoint: Path, data: TranslationDataConfig) -> Tokenizer:
    """Return the tokenizer in the run's folder or, if there is none, the one that the run's settings name."""
    kept = checkpoint.parent.parent / TOKENIZER_FILE
    if kept.is_file():
        return Tokenizer(kept)
    if (tokenizer := open_tokenizer(data.name, data.tokenizer)) is None:
        raise ConfigError(
            f"{checkpoint} was trained on the ids of data.name={data.name} without a tokenizer, expected one that "
            f"turns text into them: copy the SentencePiece model that made them to {kept}."
        )
    return tokenizer
