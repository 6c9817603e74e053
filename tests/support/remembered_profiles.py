"""Profiles of models that several tests plan: to describe one takes a second, to plan with it hardly anything.

tests/planning describes layers itself.
"""

import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from gpipe.config import RunConfig
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.profile import LayerProfile
from gpipe.programs import layout

_describe_training, _describe_evaluation = layout.training_profiler, layout.evaluation_profiler
Profiler = Callable[[int], list[LayerProfile]]
_NOTHING_TO_LAYERS = {"cutout", "max_images", "num_workers", "prefetch_factor", "validation_images"}  # of the data


def remember_profiles(folder: Path) -> None:
    """From now on, describe equal models with equal micro-batches once, in this process and in its forks.

    Args:
        folder: where the profiles are kept, for several processes; it must be new, and belong to nobody else.
    """

    def training(run: RunConfig, measured: OperationMemory | None = None) -> Profiler:
        key = "training", measured is None, run.model, _seen(run), run.trainer.autocast, run.trainer.label_smoothing
        return _remembering(folder, key, lambda: _describe_training(run, measured))

    def evaluation(run: RunConfig) -> Profiler:
        key = "evaluation", run.model, _seen(run), run.trainer.evaluation.autocast
        return _remembering(folder, key, lambda: _describe_evaluation(run))

    layout.training_profiler, layout.evaluation_profiler = training, evaluation


def _seen(run: RunConfig) -> dict[str, Any]:
    """Return the settings of the data that layers can see."""
    return {name: value for name, value in vars(run.data).items() if name not in _NOTHING_TO_LAYERS}


def _remembering(folder: Path, key: tuple[Any, ...], make: Callable[[], Profiler]) -> Profiler:
    def profile(size: int) -> list[LayerProfile]:
        path = folder / sha256(str((size, *key)).encode()).hexdigest()
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(make()(size)))
            unfinished.rename(path)
        found: list[LayerProfile] = pickle.loads(path.read_bytes())
        return found

    return profile
