"""Whole runs of replicas that share out the optimizer's state leave what runs leave that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.train_program import TINY, run_folder, start

STEPS = (3, 5)  # that are saved
REPLICAS = (
    *TINY, f"trainer.max_steps={STEPS[1]}", f"trainer.checkpoints.every_steps={STEPS[0]}", "trainer.checkpoints.keep=2",
    "trainer.batch_size=32", "trainer.evaluation.every_epochs=null", "pipeline.num_stages=2",
    "pipeline.num_microbatches=2", "launch.num_replicas=2", "launch.num_processes=4",
)  # fmt: skip


def train(folder: Path, *words: str) -> Path:
    """Train in a new folder; return that of the checkpoints."""
    folder.mkdir()
    done = start(folder, *REPLICAS, *words)
    assert done.returncode == 0, done.stderr
    return run_folder(folder) / "checkpoints"


def read_tensors(checkpoints: Path, step: int) -> dict[str, bytes]:
    (checkpoint,) = checkpoints.glob(f"step-*{step}")
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.slow
def test_a_run_with_shared_state_saves_the_same_bytes_and_either_resumes_the_other(tmp_path: Path) -> None:
    ways = {name: f"launch.shard_optimizer={name}" for name in ("true", "false")}
    whole = {name: train(tmp_path / name, word) for name, word in ways.items()}
    expected = {step: read_tensors(whole["false"], step) for step in STEPS}
    kinds = {name.rpartition("-")[0] for name in expected[STEPS[0]]}
    assert {"weights", "optimizer", "ema"} <= kinds
    assert {step: read_tensors(whole["true"], step) for step in STEPS} == expected
    for name, word in ways.items():
        (other,) = whole["true" if name == "false" else "false"].glob(f"step-*{STEPS[0]}")
        resumed = train(tmp_path / f"resumed with {name}", word, f"trainer.resume_from='{other}'")
        assert read_tensors(resumed, STEPS[1]) == expected[STEPS[1]]
