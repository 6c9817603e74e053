"""Profiles of models that several tests plan: to describe one takes a second, to plan with it hardly anything.

tests/planning describes layers itself.
"""

import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from gpipe.config import RunConfig
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.profile import LayerProfile
from gpipe.programs import build

_make_profiler = build._profiler


def remember_profiles(folder: Path) -> None:
    """From now on, describe equal models with equal micro-batches once, in this process and in its forks.

    Args:
        folder: where the profiles are kept, for several processes; it must be new, and belong to nobody else.
    """
    build._profiler = lambda run, memory: _remembering(run, memory, folder)


def _remembering(run: RunConfig, memory: OperationMemory | None, folder: Path) -> Callable[[int], list[LayerProfile]]:
    profiler = _make_profiler(run, memory)

    def profile(size: int) -> list[LayerProfile]:
        key = str((size, memory is None, run.model, run.data, run.trainer.autocast, run.trainer.label_smoothing))
        path = folder / sha256(key.encode()).hexdigest()
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(profiler(size)))
            unfinished.rename(path)
        found: list[LayerProfile] = pickle.loads(path.read_bytes())
        return found

    return profile
