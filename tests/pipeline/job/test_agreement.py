"""Processes that call a pipeline in different ways, or no more, are told so."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from tests.pipeline.job.faults import (
    Layer,
    Loss,
)
from tests.support.hosts import host_of_its_own
from tests.support.process_pool import ProcessPool

pytestmark = pytest.mark.alone


def disagree(rank: int) -> str:
    """Evaluate in the first stage's process while the others train."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("stage",))
    pipeline = gpipe.Pipeline(
        nn.Sequential(Layer(), Layer(), Layer()), Loss(None), [1, 1, 1], 2, mesh=mesh, timeout_seconds=1.0
    )
    try:
        if rank == 0:
            pipeline.job.gather(1)
        else:
            pipeline.train_step((None, torch.ones(8, 4)))
    except gpipe.PipelineError as error:
        return str(error)
    return ""


def test_processes_that_make_different_calls_are_told_so(pool: ProcessPool) -> None:
    for text in pool.run(3, disagree):
        assert "wait for each other; every process must make the same calls to the pipeline" in text


def give_other_arguments(rank: int, what: str) -> tuple[str, str]:
    """Give one process something else than the other; return the error, and that of the next step."""
    are_replicas = what == "frozen" or what.endswith("of a replica")
    mesh = init_device_mesh("cpu", (2, 1) if are_replicas else (1, 2), mesh_dim_names=("replica", "stage"))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with host_of_its_own() if what.endswith("apart") else nullcontext():
        pipeline = gpipe.Pipeline(
            layers, Loss(None), [2] if are_replicas else [1, 1], 2, mesh=mesh, timeout_seconds=10.0
        )
    batch, errors = (torch.ones(8, 4), torch.ones(8, 4)), []
    scaler = None
    if what != "scaler":
        scaler = gpipe.GradientScaler(2.0**4 if what.startswith("scale") and rank == 1 else 2.0**3)
    if what == "scaler" and rank == 1:
        scaler = gpipe.GradientScaler()
    if what.startswith("step"):
        pipeline.step = rank
    if what == "frozen":
        layers[rank].requires_grad_(False)
    for number in range(3):
        try:
            if what.startswith("evaluation") and rank == number == 0:
                pipeline.evaluate(batch[0])
            else:
                pipeline.train_step(
                    batch, scaler=scaler, max_gradient_norm=1.0 if what.startswith("norm") and rank == 0 else None
                )
        except (ValueError, gpipe.PipelineError) as error:
            errors.append(str(error))
    return errors[0], errors[-1]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("scaler", r"scaler\.scale is None in process 0 of the pipeline and 65536\.0 in process 1 of the pipeline;"),
        ("scale", r"scaler\.scale is 8\.0 in process 0 of the pipeline and 16\.0 in process 1 of the pipeline;"),
        ("norm", r"max_gradient_norm is 1\.0 in process 0 of the pipeline and None in process 1 of the pipeline;"),
        ("step", r"step is 0 in process 0 of the pipeline and 1 in process 1 of the pipeline; give every"),
        ("frozen", r"requires_grad of layers\.0\.weight is False in replica 0 and True in replica 1; give every"),
        ("evaluation", r"every process must make the same calls to the pipeline, in the same order"),
        ("evaluation, apart", r"every process must make the same calls to the pipeline, in the same order"),
        ("norm of a replica", r"max_gradient_norm is 1\.0 in replica 0 and None in replica 1; give every process the"),
        ("step of a replica", r"step is 0 in replica 0 and 1 in replica 1; give every process the same"),
        ("scale of a replica", r"scaler\.scale is 8\.0 in replica 0 and 16\.0 in replica 1; give every process the"),
    ],
)
def test_processes_that_are_given_different_things_are_told_so(what: str, said: str, pool: ProcessPool) -> None:
    for first, second in pool.run(2, give_other_arguments, what):
        assert re.search(said, first), first
        assert second.startswith("this pipeline has stopped"), second


def use_when_closed(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1], 2, mesh=mesh, timeout_seconds=10.0)
    pipeline.close()
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step((torch.ones(8, 4), torch.ones(8, 4)))
    return str(error.value)


def test_a_pipeline_that_was_closed_says_so(pool: ProcessPool) -> None:
    said = "this pipeline has stopped and cannot continue; build a new one. The cause: it was closed"
    assert pool.run(2, use_when_closed) == [said, said]


def stop_early(rank: int) -> str:
    """Close the pipeline in one process, or let go of it, and take a step in the other."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = gpipe.Pipeline(layers, Loss(None), [1, 1], 2, mesh=mesh, timeout_seconds=10.0)
    batch = torch.ones(8, 4), torch.ones(8, 4)
    pipeline.train_step(batch)
    if rank == 0:
        pipeline.close()
        return ""
    with pytest.raises(gpipe.PipelineError) as error:
        pipeline.train_step(batch)
    return str(error.value)


def test_a_process_that_closes_its_pipeline_is_not_taken_for_killed(pool: ProcessPool) -> None:
    _, said = pool.run(2, stop_early)
    assert re.search(
        r"^stage 0 \(rank 0, .*\) has closed its pipeline; every process must make the same calls to it", said
    )
