"""What the loaders of a run on a GPU yield."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from hydra import compose, initialize_config_dir

from gpipe.config import RunConfig, register_schemas, to_run
from gpipe.launch.processes import Place
from gpipe.programs.build import build_layers, build_pipeline, build_tracker, build_trainer
from gpipe.programs.layout import Layout, share_layout
from tests.simulated_cuda.environment import ROOT

_SMALL = (
    "model.num_layers=3", "model.num_filters=8", "data.image_size=32", "data.num_workers=0", "trainer.batch_size=16",
    "pipeline.num_stages=1", "tracking=disabled", "launch.device=cuda",
)  # fmt: skip


_PLACE = Place(None, "cuda")


def describe_loaders(rank: int, settings: Iterable[tuple[str, ...]]) -> list[dict[str, str]]:
    """Return the type of the images of each loader of small runs, by what they are for."""
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        runs = [to_run(compose("train", overrides=[*_SMALL, *words])) for words in settings]
    layout = share_layout(runs[0], build_layers(runs[0]), _PLACE)  # one stage, whatever the images are
    return [_describe(run, layout) for run in runs]


def _describe(run: RunConfig, layout: Layout) -> dict[str, str]:
    pipeline = build_pipeline(run, build_layers(run), layout, _PLACE)
    with tempfile.TemporaryDirectory() as folder, build_tracker(run, Path(folder), [], enabled=False) as tracker:
        trainer = build_trainer(run, pipeline, _PLACE, Path(folder), tracker, lambda timeline: None)
    assert trainer.statistics_loader is not None
    loaders = {"training": trainer.train_loader, "statistics": trainer.statistics_loader}
    loaders["test"] = trainer.evaluation_loaders["test"]
    return {name: str(next(iter(loader))[0].dtype) for name, loader in loaders.items()}
