"""Devices on which a pipeline cannot train are refused at once."""

from __future__ import annotations

import pytest

from tests.simulated_cuda import device_choice
from tests.simulated_cuda.machine import Machine


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["cpu", "cpu"], "cpu, cpu"),
        (["cuda:1", "cuda:1"], "cuda:1, cuda:1"),
        (["meta", "meta"], "cpu, cpu"),
        (["meta", "cuda:1"], "cuda:1, cuda:1"),  # the layer on the meta device gets its memory there
        (
            ["cuda:0", "cuda:1"],
            "the layers are on cuda:0, cuda:1, and no devices are given; set devices, one per stage or one for all",
        ),
    ],
)
def test_stages_are_where_the_layers_are(devices: list[str], expected: str, simulated: Machine) -> None:
    assert simulated.run(1, device_choice.choose_none, devices) == [expected]


@pytest.mark.parametrize(
    ("num_replicas", "num_stages", "kind"), [(1, 2, "stage"), (2, 1, "replica"), (2, 2, "replica")]
)
def test_processes_on_cpus_and_gpus_do_not_mix(
    num_replicas: int, num_stages: int, kind: str, simulated: Machine
) -> None:
    num_processes = num_replicas * num_stages
    assert (
        simulated.run(num_processes, device_choice.mix, num_replicas, num_stages)
        == [f"devices is cpu in {kind} 0 and cuda in {kind} 1; give every process the same"] * num_processes
    )
