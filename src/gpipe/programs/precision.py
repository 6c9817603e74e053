"""The precision of a run's products, which its settings may leave to the device, and the kernels that compute them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpipe.config import Autocast, RunConfig
from gpipe.planning.accelerator import Accelerator
from gpipe.programs.workloads import workload_of
from gpipe.training.numerics import set_numerics


def settle_precision(run: RunConfig, accelerator: Accelerator) -> RunConfig:
    """Return a run with `autocast: auto` and `channels_last: null` resolved for a device.

    That is bfloat16 if the device has hardware for it, and channels last on a GPU, whose convolution units read that
    format.
    """
    is_faster = accelerator.flops_per_second("bfloat16") > accelerator.flops_per_second("float32")
    found = Autocast.bfloat16 if is_faster else Autocast.none
    trainer, evaluation = run.trainer, run.trainer.evaluation
    if evaluation.autocast is Autocast.auto:
        evaluation = replace(evaluation, autocast=found)
    autocast = found if trainer.autocast is Autocast.auto else trainer.autocast
    last = accelerator.name != "cpu" if trainer.channels_last is None else trainer.channels_last
    return replace(run, trainer=replace(trainer, autocast=autocast, channels_last=last, evaluation=evaluation))


def precision_of(run: RunConfig) -> str:
    """Return the data type of a run's products; the precision must be settled."""
    assert run.trainer.autocast is not Autocast.auto
    return "float32" if run.trainer.autocast is Autocast.none else run.trainer.autocast.value


def build_autocast(precision: Autocast, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of contexts for forward passes in a precision, which must be settled."""
    assert precision is not Autocast.auto
    if precision is Autocast.none:
        return nullcontext
    return partial(torch.autocast, device_type, getattr(torch, precision.value))


def choose_kernels(run: RunConfig) -> None:
    """Tell torch which kernels the run may use in this process; call this before the first product on a GPU."""
    set_numerics(**kernels_of(run), tries_kernels=not workload_of(run).varies_in_length)


def kernels_of(run: RunConfig) -> dict[str, Any]:
    """Return the run's settings of kernels."""
    precision = run.trainer.float32_matmul_precision
    return {
        "deterministic": bool(run.trainer.deterministic),
        "float32_matmul_precision": "highest" if precision is None else precision.value,
    }


def compile_options_of(run: RunConfig) -> dict[str, Any] | None:
    """Return torch.compile's options for the run's layers; None if they are not compiled."""
    if not run.trainer.compile:
        return None
    # Layers for sentences are compiled for any length, once there is a second one. Inductor cannot compile AmoebaNet's
    # cells for any number of images.
    return {"dynamic": None if workload_of(run).varies_in_length else False}
