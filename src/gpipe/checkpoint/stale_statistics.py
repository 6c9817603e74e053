"""Detect checkpoints whose batch norms have moving averages instead of estimated statistics."""

from collections.abc import Mapping
from pathlib import Path

from gpipe.checkpoint.manifest import Manifest


def describe_stale_statistics(checkpoint: Path, manifest: Manifest, kind: str) -> str | None:
    """Say that a checkpoint's batch norms have moving averages, which lag behind the weights.

    Returns:
        A sentence about the tensors of a kind, "ema" or "weights", with a remedy and without a full stop. None if an
        evaluation has replaced the moving averages, if the run never estimates statistics, or without batch norms.
    """
    names = manifest.tensors.get(kind, {})
    trainer = manifest.config.get("trainer")
    settings = trainer.get("evaluation") if isinstance(trainer, Mapping) else None
    if not isinstance(settings, Mapping):  # another program's checkpoint
        return None
    if settings.get("statistics_batches") is None or not any(name.endswith(".running_mean") for name in names):
        return None
    step = manifest.position.step
    found: int | None = manifest.results.get("evaluated_step")
    lag = "have moving averages, which lag behind the weights, so figures may be far off"
    if found != step:
        since = "without an evaluation" if found is None else f"{step - found} steps after its last evaluation"
        return (
            f"{checkpoint} was saved {since}: its batch norms {lag}; name a checkpoint that was evaluated, or resume "
            "the run, which ends with an evaluation"
        )
    if kind == "weights" and "ema" in manifest.tensors and settings.get("raw") is False:
        return (
            f"{checkpoint} was evaluated with trainer.evaluation.raw=false: beside the averages, the batch norms of "
            f"the weights themselves {lag}; use the averages, or evaluate with trainer.evaluation.raw=true in training"
        )
    return None
