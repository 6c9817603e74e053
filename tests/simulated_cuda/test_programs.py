"""Whole runs of train.py on simulated GPUs train what one process on the CPU trains, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.simulated_cuda.environment import read_faults, run_on_gpus
from tests.support.train_program import TRAIN, metrics, run_folder, start, weights

# It saves in the midst of training and at the end, evaluates with new statistics, and draws timelines.
SETTINGS = (
    "+experiment=amoebanet_imagenet_laptop", "trainer.max_steps=3", "trainer.batch_size=16",
    "pipeline.num_microbatches=2", "trainer.evaluation.batch_size=100", "trainer.evaluation.max_batches=1",
    "trainer.evaluation.statistics_batches=2",
    "trainer.timeline_every_steps=1", "trainer.checkpoints.every_steps=2", "trainer.checkpoints.keep=1",
    "model.num_filters=8", "data.image_size=32",
    "schedule.warm_up_epochs=0", "optimizer.clip_norm=1", "launch.num_threads=1", "tracking=disabled",
)  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in one process without a pipeline."""
    folder = tmp_path_factory.mktemp("cpu")
    done = start(folder, *SETTINGS, "pipeline.num_stages=1", "launch.num_processes=1", "launch.device=cpu")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("programs on GPUs")  # beside one run on the CPU
@pytest.mark.parametrize(
    "settings",
    [["launch=one_process", "launch.device_threads=true"], ["launch=process_per_stage", "trainer.cuda_graphs=true"]],
    ids=" ".join,
)
def test_a_run_on_two_gpus_is_the_one_on_the_cpu(settings: list[str], on_cpu: Path, tmp_path: Path) -> None:
    done = run_on_gpus(TRAIN, *SETTINGS, *settings, "launch.device=cuda", folder=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_faults(tmp_path) == []
    found, expected = weights(run_folder(tmp_path)), weights(run_folder(on_cpu))
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]
    assert metrics(tmp_path) == metrics(on_cpu)
    assert (run_folder(tmp_path) / "timeline.json").exists()
