"""Batch norms are stale where the weights were not evaluated as they are."""

from pathlib import Path
from typing import Any

import pytest

from gpipe.checkpoint.manifest import Manifest, Position, TensorEntry
from gpipe.checkpoint.stale_statistics import describe_stale_statistics

ENTRY = TensorEntry("F32", (1,), "weights-1.safetensors")


def manifest_of(
    settings: dict[str, Any], results: dict[str, Any], *, averages: bool = True, tensor: str = "layers.0.running_mean"
) -> Manifest:
    """Return the manifest of a checkpoint after step 9."""
    kinds = {"weights": {tensor: ENTRY}, **({"ema": {tensor: ENTRY}} if averages else {})}
    config = {"trainer": {"evaluation": {"statistics_batches": 2, "raw": True} | settings}}
    return Manifest(Position(9, 0, 9, 0), 1, None, config, results, {}, kinds)


NOW, BEFORE, NEVER = {"evaluated_step": 9}, {"evaluated_step": 5}, {"evaluated_step": None}


@pytest.mark.parametrize(
    ("manifest", "averages", "weights"),
    [
        (manifest_of({}, NOW), None, None),
        (manifest_of({}, BEFORE), "saved 4 steps after its last evaluation", "saved 4 steps after its last evaluation"),
        (manifest_of({}, NEVER), "saved without an evaluation", "saved without an evaluation"),
        (manifest_of({"raw": False}, NOW), None, "evaluated with trainer.evaluation.raw=false"),
        (manifest_of({"raw": False}, NOW, averages=False), None, None),
        (manifest_of({"statistics_batches": None}, NEVER), None, None),
        (manifest_of({}, NEVER, tensor="layers.0.weight"), None, None),
    ],
)
def test_what_an_evaluation_did_not_estimate_is_stale(
    manifest: Manifest, averages: str | None, weights: str | None
) -> None:
    for kind, said in (("ema", averages), ("weights", weights)):
        found = describe_stale_statistics(Path("here"), manifest, kind)
        assert found is None if said is None else found is not None and found.startswith(f"here was {said}: ")


@pytest.mark.parametrize("config", [{}, {"trainer": 3}, {"trainer": {"evaluation": None}}], ids=str)
def test_of_another_programs_checkpoint_nothing_is_known(config: dict[str, Any]) -> None:
    manifest = Manifest(Position(9, 0, 9, 0), 1, None, config, NEVER, {}, {"weights": {"layers.0.running_mean": ENTRY}})
    assert describe_stale_statistics(Path("here"), manifest, "weights") is None
