"""Describe a run's layers for planning, once per process: pipeline=auto plans its choice a second time."""

from __future__ import annotations

import json
from collections.abc import Callable

from gpipe.config import RunConfig, to_plain
from gpipe.planning.interpolation import KnownProfiles
from gpipe.planning.operation_memory import OperationMemory
from gpipe.planning.profile import LayerProfile, profile_layers
from gpipe.programs.precision import build_autocast
from gpipe.programs.workloads import workload_of

_ELSEWHERE = ("pipeline", "launch")  # settings of where layers run, not of what they are
_known: dict[tuple[str, str], KnownProfiles] = {}


def training_profiler(run: RunConfig, measured: OperationMemory | None = None) -> Callable[[int], list[LayerProfile]]:
    """Return a function that describes the layers and the loss in training with a micro-batch of a given size.

    Args:
        run: the settings, with the precision settled.
        measured: runs operations at each call to measure their memory; None leaves that out.
    """
    workload = workload_of(run)
    autocast = build_autocast(run.trainer.autocast, "cpu")

    def describe(size: int) -> list[LayerProfile]:
        example = workload.inputs(size), workload.targets(size)
        return profile_layers(workload.layers(), workload.loss(), example, autocast=autocast, measured=measured)

    return describe if measured is not None else _remember(run, "training", describe)


def evaluation_profiler(run: RunConfig) -> Callable[[int], list[LayerProfile]]:
    """Return a function that describes the layers and the metrics in evaluation with a micro-batch of a given size."""
    workload = workload_of(run)
    measure = workload.make_metrics().measure
    autocast = build_autocast(run.trainer.evaluation.autocast, "cpu")

    def describe(size: int) -> list[LayerProfile]:
        example = workload.inputs(size), workload.evaluated_targets(size)
        return profile_layers(workload.layers(), measure, example, autocast=autocast, training=False)

    return _remember(run, "evaluation", describe)


def _remember(
    run: RunConfig, purpose: str, describe: Callable[[int], list[LayerProfile]]
) -> Callable[[int], list[LayerProfile]]:
    settings = {key: value for key, value in to_plain(run).items() if key not in _ELSEWHERE}
    return _known.setdefault((purpose, json.dumps(settings, sort_keys=True)), KnownProfiles(describe))
