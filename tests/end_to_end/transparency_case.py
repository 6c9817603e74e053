"""One setting of a pipeline, run for two steps: all that can be seen of it afterwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.support import layer_zoo, random_layers

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


@dataclass(frozen=True)
class Case:
    """A sequence of layers, how it is cut, and the mini-batch.

    Attributes:
        is_zoo: whether the kinds are those of `layer_zoo`, not of `random_layers`.
        is_mixed: whether it runs in bfloat16 under autocast.
    """

    kinds: tuple[str, ...]
    partitions: tuple[int, ...]
    num_microbatches: int
    batch_size: int
    rematerialize: str | tuple[int, ...]
    dtype: torch.dtype = torch.float32
    schedule: str = "gpipe"
    stages_per_device: int = 1
    is_zoo: bool = False
    is_mixed: bool = False
    optimizer: str = "sgd"

    def one_stage(self) -> Case:
        """Return the same training without a pipeline: the oracle.

        Whole or split, backwards go through the micro-batches as in GPipe, or as in 1F1B.
        """
        return replace(
            self,
            partitions=(len(self.kinds) + 1,),
            rematerialize="never",
            schedule="gpipe" if self.schedule in ("gpipe", "split_gpipe") else "1f1b",
            stages_per_device=1,
        )


@dataclass
class Outcome:
    """What a run left behind; parameters and buffers by name, None for a missing gradient."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray | None]
    state: dict[str, np.ndarray]
    output: np.ndarray | None


STAGES_PER_DEVICE = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "split_gpipe": 1, "zb_h1": 1, "zb_v": 2}


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Return all ways to cut so many layers into so many partitions."""
    places = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *place, num_layers))) for place in places]


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return made-up inputs and targets."""
    generator = torch.Generator().manual_seed(case.batch_size)
    shape = (4, 6) if case.is_zoo else (4, 6, 6)
    inputs = torch.randn(case.batch_size, *shape, generator=generator, dtype=torch.float64)
    return inputs.to(case.dtype), torch.randint(5, (case.batch_size,), generator=generator)


def run(case: Case, mesh: Any = None) -> Outcome:
    """Train for two steps with momentum and clipping, and evaluate."""
    layers = layer_zoo.build(case.kinds) if case.is_zoo else random_layers.build(case.kinds).to(case.dtype)
    pipeline = gpipe.Pipeline(
        layers,
        nn.functional.cross_entropy,
        case.partitions,
        case.num_microbatches,
        rematerialize=case.rematerialize,
        schedule=case.schedule,
        stages_per_device=case.stages_per_device,
        mesh=mesh,
        seed=3,
        timeout_seconds=10,
    )
    nothing = torch.zeros(1, requires_grad=True)  # torch's optimizers refuse a stage without parameters
    optimizer = OPTIMIZERS[case.optimizer]([*pipeline.parameters(), nothing])
    inputs, targets = batch(case)
    generator_state = torch.get_rng_state()
    losses, norms = [], []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.is_mixed):
            report = pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
        losses.append(report.loss)
        norms.append(pipeline.clip_gradients(0.5))
        optimizer.step()
    with torch.autocast("cpu", torch.bfloat16, enabled=case.is_mixed):
        output = pipeline.evaluate(inputs if pipeline.is_first else None)
    assert torch.equal(torch.get_rng_state(), generator_state), "the user's generator was disturbed"
    gradients = {n: None if p.grad is None else p.grad.numpy() for n, p in pipeline.named_parameters()}
    state = {f"layers.{name}": value.numpy() for name, value in pipeline.layers.state_dict().items()}
    pipeline.close()
    return Outcome(losses, norms, gradients, state, None if output is None else output.numpy())


def run_in_processes(rank: int, cases: list[Case]) -> list[Outcome]:
    """Run cases with one process per device; all have the same number of devices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("stage",))
    return [run(case, mesh) for case in cases]


def assert_bitwise_equal(found: Outcome, expected: Outcome, stages: str) -> None:
    """Compare everything that both have; a process knows only its own layers."""
    assert found.losses == expected.losses, f"{stages}: losses {found.losses}, expected {expected.losses}"
    assert found.norms == expected.norms, f"{stages}: norms {found.norms}, expected {expected.norms}"
    for name, gradient in found.gradients.items():
        _same(gradient, expected.gradients[name], f"{stages}: gradient of {name}")
    for name, value in found.state.items():
        _same(value, expected.state[name], f"{stages}: {name}")
    if found.output is not None:
        _same(found.output, expected.output, f"{stages}: evaluation")


def _same(found: np.ndarray | None, expected: np.ndarray | None, what: str) -> None:
    if found is None or expected is None:
        assert found is expected, f"{what} is {'missing' if found is None else 'there'}"
    else:
        assert np.array_equal(found, expected), f"{what} differs by {np.abs(found - expected).max()}"
