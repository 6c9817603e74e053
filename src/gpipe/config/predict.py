"""The settings of predict.py: what to classify, and how to give the answers."""

from dataclasses import dataclass

from omegaconf import MISSING

from gpipe.config.checks import ConfigError, Section, at_least
from gpipe.config.pipeline import Device

LITERAL = ("checkpoint", "images", "output", "grid")
"""Settings that are file names."""


@dataclass
class PredictConfig(Section):
    """A checkpoint and images.

    Attributes:
        checkpoint: a run's folder or a checkpoint's.
        images: an image file, or a folder, whose images are taken in the order of their names, subfolders included.
        output: the CSV file for the answers; null prints them.
        grid: a PNG file that shows the first images with their most probable class; null draws none.
        top: the number of classes per image.
        batch_size: images to classify at once.
        debug: print whole tracebacks.
    """

    checkpoint: str | None = MISSING
    images: str | None = MISSING
    output: str | None = MISSING
    grid: str | None = MISSING
    top: int = at_least(1)
    batch_size: int = at_least(1)
    device: Device = MISSING
    debug: bool = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, what in (("checkpoint", "a run's folder"), ("images", "an image, or a folder of images")):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is null, expected {what}: set {name}=<{what}>.")
