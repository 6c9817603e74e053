"""A scaler keeps small gradients of float16, skips a step that overflows on every stage, and goes on from its state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import gpipe
from tests.support.process_pool import ProcessPool


def build(gain: float = 1.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Gain(gain), nn.Linear(4, 3))
    gpipe.convert_batch_norm(layers)
    return layers


class Gain(nn.Module):
    """Leaves numbers as they are, and multiplies their gradients in float16."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda gradient: (gradient.half() * self.gain).float())
        return x


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def pipeline_of(layers: nn.Sequential, partitions: list[int], **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, F.cross_entropy, partitions, 2, timeout_seconds=10, **options)


@pytest.mark.parametrize("partitions", [[4], [2, 2]])
def test_a_power_of_two_changes_no_bit_and_steps_add_up(partitions: list[int]) -> None:
    found = []
    for scaler in (None, gpipe.GradientScaler(2.0**10)):
        layers = build()
        layers[2] = nn.Identity()
        pipeline = pipeline_of(layers, partitions)
        reports = [pipeline.train_step(batch(), scaler=scaler) for _ in range(2)]
        found.append([torch.tensor([report.loss for report in reports]), *(p.grad for p in layers.parameters())])
    for scaled, plain in zip(*found, strict=True):
        assert torch.equal(scaled, plain)


def test_steps_with_a_tied_parameter_add_up() -> None:
    found = []
    for scaler in (None, gpipe.GradientScaler(2.0**10)):
        layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        layers[0].load_state_dict(build()[3].state_dict() | {"weight": torch.eye(3)})
        layers[2].weight = layers[0].weight
        nn.init.zeros_(layers[2].bias)
        pipeline = pipeline_of(layers, [2, 1])
        for _ in range(2):
            pipeline.train_step(batch(), scaler=scaler)
        found.append([parameter.grad for parameter in pipeline.parameters()])
    for scaled, plain in zip(*found, strict=True):
        assert torch.equal(scaled, plain)


def test_gradients_that_float16_would_lose_are_kept() -> None:
    found = []
    for scale in (1.0, 2.0**16):
        layers = build(gain=1e-7)
        pipeline_of(layers, [2, 2]).train_step(batch(), scaler=gpipe.GradientScaler(scale))
        found.append(float(layers[0].weight.grad.norm()))
    assert found[0] == 0 < found[1]


def skip(rank: int, num_stages: int) -> list[Any]:
    """Train with a scale that is too large at first; return what a process has of each step."""
    mesh = None if num_stages == 1 else init_device_mesh("cpu", (num_stages,), mesh_dim_names=("stage",))
    layers = build(gain=100.0)
    pipeline = pipeline_of(layers, [4] if num_stages == 1 else [2, 2], mesh=mesh)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    scaler = gpipe.GradientScaler(2.0**20, growth_interval=3)
    found: list[Any] = []
    for _ in range(12):
        before = {name: value.clone() for name, value in pipeline.layers.state_dict().items()}
        report = pipeline.train_step(batch(), scaler=scaler)
        has_gradients = any(parameter.grad is not None for parameter in pipeline.parameters())
        norm = pipeline.clip_gradients(10.0)
        optimizer.step()
        optimizer.zero_grad()
        after = pipeline.layers.state_dict()
        is_changed = any(not torch.equal(after[name], value) for name, value in before.items())
        assert has_gradients is is_changed is not report.is_skipped
        found.append((report.step, report.is_skipped, report.loss, norm, scaler.scale, pipeline.step))
    pipeline.close()
    return found


def test_a_step_that_overflows_is_skipped_on_every_process(processes: ProcessPool) -> None:
    expected = skip(0, 1)
    assert processes.run(2, skip, 2) == [expected, expected]
    skipped = [is_skipped for _, is_skipped, *_ in expected]
    assert skipped[0] and not all(skipped)
    assert [steps for *_, steps in expected][-1] == skipped.count(False)
    scale, num_steps = 2.0**20, 0
    for _, is_skipped, _, norm, found, _ in expected:
        num_steps = 0 if is_skipped else num_steps + 1
        scale *= 0.5 if is_skipped else 2.0 if num_steps % 3 == 0 else 1.0
        assert (found, norm == 0) == (scale, is_skipped)


def test_a_skipped_step_leaves_no_statistics() -> None:
    layers, others, scaler = build(gain=100.0), build(), gpipe.GradientScaler(2.0**20)
    pipeline, (inputs, targets) = pipeline_of(layers, [2, 2]), batch()
    assert pipeline.train_step((3 * inputs, targets), scaler=scaler).is_skipped
    scaler.scale = 1.0
    pipeline.train_step((inputs, targets), scaler=scaler)
    pipeline_of(others, [2, 2]).train_step((inputs, targets))
    assert all(map(torch.equal, layers[1].buffers(), others[1].buffers()))


def skip_in_a_replica(rank: int, num_stages: int) -> list[Any]:
    """Train two replicas, of which the second alone overflows; return what a process has of each step."""
    mesh = init_device_mesh("cpu", (2, num_stages), mesh_dim_names=("replica", "stage"))
    layers = build(gain=100.0 if rank >= num_stages else 1.0)
    pipeline = pipeline_of(layers, [4] if num_stages == 1 else [2, 2], mesh=mesh)
    scaler = gpipe.GradientScaler(2.0**14)
    reports = [pipeline.train_step(batch(), scaler=scaler) for _ in range(8)]
    gradients = [None if p.grad is None else p.grad.tolist() for p in pipeline.parameters()]
    pipeline.close()
    return [[(report.is_skipped, report.step) for report in reports], scaler.scale, pipeline.step, gradients]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_that_overflows_in_one_replica_is_skipped_in_all(num_stages: int, processes: ProcessPool) -> None:
    found = processes.run(2 * num_stages, skip_in_a_replica, num_stages)
    skipped = [is_skipped for is_skipped, _ in found[0][0]]
    assert skipped[0] and not skipped[-1]
    assert found[:num_stages] == found[num_stages:], "replicas have the same steps and the same gradients"
    assert len({str(each[:3]) for each in found}) == 1


def test_a_loss_that_is_not_finite_is_an_error_all_the_same() -> None:
    pipeline = gpipe.Pipeline(build(), lambda outputs, _: outputs.sum() * math.inf, [2, 2], 2)
    with pytest.raises(gpipe.NonFiniteError, match=r"^the loss of step 0 is (inf|-inf|nan) in stage 1;"):
        pipeline.train_step(batch(), scaler=gpipe.GradientScaler())


def test_a_scaler_goes_on_from_its_state() -> None:
    first, second = (gpipe.GradientScaler(8.0, growth_interval=3) for _ in range(2))
    for is_skipped in (True, False, False):
        first.update(is_skipped=is_skipped)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        scaler.update(is_skipped=False)
        assert (scaler.scale, scaler.state_dict()) == (8.0, {"scale": 8.0, "num_steps": 0, "num_skipped": 1})


def test_a_scaler_that_goes_on_with_a_shorter_interval_rises() -> None:
    scaler = gpipe.GradientScaler(growth_interval=3)
    scaler.load_state_dict({"scale": 8.0, "num_steps": 5, "num_skipped": 0})
    scaler.update(is_skipped=False)
    assert scaler.state_dict() == {"scale": 16.0, "num_steps": 0, "num_skipped": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0; it must be a number, finite and above 0"),
        ({"scale": "cuda"}, "scale is 'cuda'; it must be a number, finite and above 0"),  # what torch's takes
        ({"scale": math.inf}, "scale is inf; it must be a number, finite and above 0"),
        ({"growth_factor": 0.5}, "growth_factor is 0.5; it must be a number, finite and at least 1"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0; it must be a number, between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval is 0; it must be a number, whole and at least 1"),
        ({"growth_interval": 2.5}, "growth_interval is 2.5; it must be a number, whole and at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        gpipe.GradientScaler(**options)


def test_a_scale_that_vanishes_is_an_error_and_so_is_one_of_a_checkpoint() -> None:
    scaler = gpipe.GradientScaler(2.0**-124, growth_interval=math.inf)
    for _ in range(2):
        scaler.update(is_skipped=True)
    with pytest.raises(ValueError, match=r"fallen below 1.17549e-38 after 3 skipped steps"):
        scaler.update(is_skipped=True)
    with pytest.raises(ValueError, match=r"^the saved scale is -3.0; it must be finite and above 0"):
        scaler.load_state_dict({"scale": -3, "num_steps": 0})


def test_its_defaults_are_those_of_torchs_scaler() -> None:
    torchs = torch.amp.GradScaler("cpu").state_dict()
    ours = gpipe.GradientScaler()
    assert (ours.scale, ours._growth_factor, ours._backoff_factor, ours._growth_interval) == (
        torchs["scale"],
        torchs["growth_factor"],
        torchs["backoff_factor"],
        torchs["growth_interval"],
    )


def test_a_scale_may_never_rise() -> None:
    for options in ({"growth_factor": 1, "growth_interval": 1}, {"growth_interval": math.inf}):
        scaler = gpipe.GradientScaler(8.0, **options)
        scaler.update(is_skipped=False)
        assert scaler.scale == 8
