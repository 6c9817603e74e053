"""What is planned for an optimizer is what it keeps, and what its update allocates on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gpipe.planning.optimizer_memory import try_optimizer
from gpipe.training.optimizers import OPTIMIZERS, adamw, rmsprop, sgd


@pytest.mark.parametrize(
    ("make", "kept", "at_once"),
    [
        (adamw, 2, 1),  # the roots of the second moments of all parameters
        (sgd, 1, 0),
        (partial(sgd, momentum=0, weight_decay=0.1), 0, 1),  # the gradients with what decays
        (rmsprop, 2, None),  # timm's goes from parameter to parameter, wherever they are
    ],
)
def test_an_update_that_does_all_at_once_allocates_as_much_as_all(
    make: Callable[..., Any], kept: int, at_once: int | None
) -> None:
    on_cpu, on_gpu = (try_optimizer(partial(make, lr=0.1), on_gpu=on_gpu) for on_gpu in (False, True))
    assert on_cpu.kept == on_gpu.kept == kept
    assert on_cpu.update < 0.1
    assert on_gpu.update == pytest.approx(at_once or 0, abs=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_tried(name: str) -> None:
    found = try_optimizer(partial(OPTIMIZERS[name], lr=0.1), on_gpu=True)
    assert found.kept >= 0 and found.update >= 0
