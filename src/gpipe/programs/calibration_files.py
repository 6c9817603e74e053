"""The files that store the measured seconds of a run's layers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpipe.config import RunConfig, to_plain
from gpipe.launch.devices import count_threads
from gpipe.pipeline.microbatch import Payload
from gpipe.planning.accelerator import Accelerator
from gpipe.planning.calibration import Calibration
from gpipe.programs.precision import kernels_of, precision_of, settle_precision
from gpipe.programs.workloads import workload_of
from gpipe.records import describe_hardware

FOLDER = Path("runs/calibrations")


def find_calibration(run: RunConfig, accelerator: Accelerator) -> Calibration | None:
    """Return the calibration of a run's layers on a kind of accelerator; None if there is none.

    Raises:
        ValueError: its file is damaged.
    """
    origin = describe_origin(run, accelerator)
    path = find_path(origin)
    if not path.exists():
        return None
    found = Calibration.read(path)
    return found if found.origin == origin else None


def find_path(origin: dict[str, Any]) -> Path:
    """Return the path of the calibration with an origin."""
    return FOLDER / f"{origin['model']['family']}-{_digest(origin)[:12]}.json"


def describe_origin(run: RunConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Describe what was measured, and on what; plans with the same origin use the calibration."""
    workload, settled = workload_of(run), settle_precision(run, accelerator)
    tensors = {name: [*tensor.shape, str(tensor.dtype)] for name, tensor in workload.layers().state_dict().items()}
    example = *Payload.of(workload.inputs(2)).tensors, *Payload.of(workload.targets(2)).tensors
    origin = {
        "model": to_plain(run)["model"],
        "tensors": _digest(tensors),  # their sizes also depend on the data
        "loss": [type(workload.loss()).__name__, run.trainer.label_smoothing],
        "examples": [[*tensor.shape[1:], str(tensor.dtype)] for tensor in example],
        "device": accelerator.name,
        "torch": torch.__version__,
        "precision": precision_of(settled),
        "channels_last": settled.trainer.channels_last,
        "kernels": kernels_of(run),
    }
    if run.trainer.compile:
        origin["compile"] = True
    if accelerator.name == "cpu":
        origin |= {"processor": describe_hardware()["cpu"], "num_threads": _count_threads(run)}
    return origin


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _count_threads(run: RunConfig) -> int:
    if dist.is_initialized():  # this process is one of the run's
        return torch.get_num_threads()
    return count_threads(run.launch.num_threads, int(os.environ.get("LOCAL_WORLD_SIZE", run.launch.num_processes)))
