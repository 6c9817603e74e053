"""A configuration of somebody else's, composed with ours."""

from pathlib import Path

from hydra import compose
from omegaconf import DictConfig


def write_config(folder: Path, text: str) -> None:
    """Write it as extra/evil.yaml below a folder of configurations."""
    path = folder / "conf" / "extra" / "evil.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{text}\n")


def compose_with(folder: Path, text: str, *overrides: str) -> DictConfig:
    """Compose train.py's configuration with it, and with what the command line says."""
    write_config(folder, text)
    search = f"hydra.searchpath=[file://{folder / 'conf'}]"
    return compose("train", overrides=[search, *overrides, "+extra=evil"], return_hydra_config=True)
