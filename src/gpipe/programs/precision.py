"""The precision of a run's products, which its settings may leave to the device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpipe.config import Autocast, RunConfig
from gpipe.planning.accelerator import Accelerator


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
