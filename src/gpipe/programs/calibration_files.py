"""Where the measured seconds of a run's layers are kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from gpipe.config import RunConfig, to_plain
from gpipe.pipeline.microbatch import Payload
from gpipe.planning.accelerator import Accelerator
from gpipe.planning.calibration import Calibration
from gpipe.programs.precision import kernels_of, precision_of, settle_precision
from gpipe.programs.workloads import workload_of
from gpipe.records import describe_hardware

FOLDER = Path("runs/calibrations")


def find_calibration(run: RunConfig, accelerator: Accelerator) -> Calibration | None:
    """Return the calibration of a run's layers on a kind of accelerator; None where nobody has made it.

    Raises:
        ValueError: its file is damaged.
    """
    path = find_path(run, accelerator)
    if not path.exists():
        return None
    found = Calibration.read(path)
    return found if found.origin == describe_origin(run, accelerator) else None


def find_path(run: RunConfig, accelerator: Accelerator) -> Path:
    """Return where the calibration of a run's layers is."""
    origin = json.dumps(describe_origin(run, accelerator), sort_keys=True)
    return FOLDER / f"{run.model.family}-{hashlib.sha256(origin.encode()).hexdigest()[:12]}.json"


def describe_origin(run: RunConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Return of what, and on what, seconds are: plans of the same origin use them."""
    workload = workload_of(run)
    example = *Payload.of(workload.inputs(2)).tensors, *Payload.of(workload.targets(2)).tensors
    origin = {
        "model": to_plain(run)["model"],
        "examples": [[*tensor.shape[1:], str(tensor.dtype)] for tensor in example],
        "device": accelerator.name,
        "torch": torch.__version__,
        "precision": precision_of(settle_precision(run, accelerator)),
        "kernels": kernels_of(run),
    }
    if accelerator.name == "cpu":
        origin |= {"processor": describe_hardware()["cpu"], "num_threads": run.launch.num_threads}
    return origin
