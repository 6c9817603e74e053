"""Records of runs that were never made, with the settings that a command composes."""

from typing import Any

from gpipe.config import compose_plain
from gpipe.records import Record, make_record


def composed(*overrides: str, seed: int = 0, init_from: str | None = "runs/other", **results: Any) -> Record:
    """The record of a run of `python train.py <overrides>` that came to these results."""
    config = {**compose_plain([*overrides, "init_from=null"]), "seed": seed, "init_from": init_from}
    return make_record(
        kind="measured", command="c", experiment=config["name"], config=config, seed=seed, results=results
    )
