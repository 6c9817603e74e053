"""The precision of a run's products, which its settings may leave to the device, and the kernels that make them."""

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
    """Return a run whose settings say what `autocast: auto` and `channels_last: null` come to on a device.

    bfloat16 where the device has units for it, and channels last on a GPU, whose units for convolutions read them so.
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
    """Return the type of data of a run's products, once it is settled."""
    assert run.trainer.autocast is not Autocast.auto
    return "float32" if run.trainer.autocast is Autocast.none else run.trainer.autocast.value


def build_autocast(precision: Autocast, device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of forward passes in a precision, once it is settled."""
    assert precision is not Autocast.auto
    if precision is Autocast.none:
        return nullcontext
    return partial(torch.autocast, device_type, getattr(torch, precision.value))


def choose_kernels(run: RunConfig) -> None:
    """Let torch take, in this process, the kernels that the run may take; call it before the first product on a GPU."""
    set_numerics(**kernels_of(run), tries_kernels=not workload_of(run).varies_in_length)


def kernels_of(run: RunConfig) -> dict[str, Any]:
    """Return what the run's settings say of kernels."""
    precision = run.trainer.float32_matmul_precision
    return {
        "deterministic": bool(run.trainer.deterministic),
        "float32_matmul_precision": "highest" if precision is None else precision.value,
    }


def compile_options_of(run: RunConfig) -> dict[str, Any] | None:
    """Return torch.compile's options for the run's layers; None where they run as they are."""
    if not run.trainer.compile:
        return None
    # Layers for sentences are compiled for any length, once there is a second one; inductor fails on AmoebaNet's cells
    # for images of any number.
    return {"dynamic": None if workload_of(run).varies_in_length else False}
