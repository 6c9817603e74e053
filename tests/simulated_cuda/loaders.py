"""What the loaders of a run on a GPU yield."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hydra import compose, initialize_config_dir

from gpipe.config import register_schemas, to_run
from gpipe.launch.processes import Place
from gpipe.programs.build import build_layers, build_pipeline, build_tracker, build_trainer
from gpipe.programs.layout import share_layout
from tests.simulated_cuda.environment import ROOT

_SMALL = (
    "model.num_layers=3", "model.num_filters=8", "data.image_size=32", "data.num_workers=0", "trainer.batch_size=16",
    "pipeline.num_stages=1", "tracking=disabled", "launch.device=cuda",
)  # fmt: skip


def describe_loaders(rank: int, words: tuple[str, ...]) -> dict[str, str]:
    """Return the type of the images of each loader of a small run, by what they are for."""
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("train", overrides=[*_SMALL, *words]))
    place, layers = Place(None, "cuda"), build_layers(run)
    pipeline = build_pipeline(run, layers, share_layout(run, layers, place), place)
    with tempfile.TemporaryDirectory() as folder, build_tracker(run, Path(folder), [], enabled=False) as tracker:
        trainer = build_trainer(run, pipeline, place, Path(folder), tracker, lambda timeline: None)
    assert trainer.statistics_loader is not None
    loaders = {"training": trainer.train_loader, "statistics": trainer.statistics_loader}
    loaders["test"] = trainer.evaluation_loaders["test"]
    return {name: str(next(iter(loader))[0].dtype) for name, loader in loaders.items()}
