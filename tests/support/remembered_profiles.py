"""Profiles of models that several tests plan: to describe one takes a second, to plan with it hardly anything.

tests/planning describes layers itself.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from gpipe.config import RunConfig
from gpipe.planning.evaluation import EvaluationPlanner
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.profile import LayerProfile
from gpipe.programs import layout

_make_profiler, _plan_evaluations = layout._profiler, layout._evaluation_planner
Profiler = Callable[[int], list[LayerProfile]]


def remember_profiles(folder: Path) -> None:
    """From now on, describe equal models with equal micro-batches once, in this process and in its forks.

    Args:
        folder: where the profiles are kept, for several processes; it must be new, and belong to nobody else.
    """

    def profiler(run: RunConfig, memory: OperationMemory | None) -> Profiler:
        key = "training", memory is None, run.model, run.data, run.trainer.autocast, run.trainer.label_smoothing
        return _remembering(folder, key, lambda: _make_profiler(run, memory))

    def evaluation_planner(run: RunConfig) -> EvaluationPlanner | None:
        planner = _plan_evaluations(run)
        if planner is None:
            return None
        key = "evaluation", run.model, run.data, run.trainer.evaluation.autocast
        return replace(planner, profiler=_remembering(folder, key, lambda: planner.profiler))

    layout._profiler, layout._evaluation_planner = profiler, evaluation_planner


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
