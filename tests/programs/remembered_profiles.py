"""Profiles of models that several tests plan: to describe one takes a second, to plan with it hardly anything."""

from collections.abc import Callable

import pytest

from gpipe.config import RunConfig
from gpipe.planning.profile import LayerProfile
from gpipe.programs import build

_KNOWN: dict[tuple[str, int], list[LayerProfile]] = {}


@pytest.fixture
def remembered_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe equal models with equal micro-batches once per process."""
    make_profiler = build._profiler

    def remember(run: RunConfig) -> Callable[[int], list[LayerProfile]]:
        key = str((run.model, run.data, run.trainer.autocast, run.trainer.label_smoothing))
        profiler = make_profiler(run)

        def profile(size: int) -> list[LayerProfile]:
            if (key, size) not in _KNOWN:
                _KNOWN[key, size] = profiler(size)
            return _KNOWN[key, size]

        return profile

    monkeypatch.setattr(build, "_profiler", remember)
