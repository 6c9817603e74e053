"""What is planned for an optimizer is what it keeps, and what its update allocates on a GPU."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn

from gpipe._compat.torch_description import watch_allocations
from gpipe.planning.optimizer_memory import try_optimizer
from gpipe.training.optimizers import OPTIMIZERS, build_optimizer


@pytest.mark.parametrize(
    ("name", "settings", "kept", "at_once"),
    [
        ("adamw", {}, 2, 0),  # fused
        ("sgd", {}, 1, 0),
        ("sgd", {"momentum": 0, "weight_decay": 0.1}, 0, 0),
        ("rmsprop", {}, 2, 2),  # the squares of the gradients, and the roots of their means
        ("rmsprop", {"weight_decay": 0.1}, 2, 3),  # and the gradients with what decays
        ("adafactor", {}, 0.08, 1),  # a row and a column of each matrix; the updates of all parameters
    ],
)
def test_an_update_that_does_all_at_once_allocates_as_much_as_all(
    name: str, settings: dict[str, float], kept: float, at_once: int
) -> None:
    make = partial(build_optimizer, name, lr=0.1, **settings)
    on_cpu, on_gpu = (try_optimizer(partial(make, on_gpus=on_gpus)) for on_gpus in (False, True))
    assert on_cpu.kept == on_gpu.kept == pytest.approx(kept, abs=0.01)
    assert on_cpu.update < 0.02 and on_gpu.largest < 0.1
    assert on_gpu.update == pytest.approx(at_once, abs=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_cpu_every_optimizer_goes_from_parameter_to_parameter(name: str) -> None:
    said, found = (try_optimizer(partial(build_optimizer, name, lr=0.1, on_gpus=it)) for it in (False, None))
    assert said == found and found.update < 0.02


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_from_parameter_to_parameter_allocates_what_the_largest_takes(name: str) -> None:
    make = partial(build_optimizer, name, lr=0.1, on_gpus=False)
    planned = try_optimizer(make)
    sizes = [(512, 64), (16, 8), (100,)]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = make([(str(number), parameter) for number, parameter in enumerate(parameters)])
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        _, moved = watch_allocations(optimizer.step)
    peak = max(accumulate(moved, initial=0))
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    assert planned.update * num_bytes + planned.largest * parameters[0].nbytes == pytest.approx(peak, rel=0.06)
