"""The table of accelerators, the one at hand, and the roofline."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.table2_throughput.study import slow_down
from gpipe.planning.accelerator import (
    ACCELERATORS,
    Accelerator,
    LayerSeconds,
    Speed,
    detect_accelerator,
    find_accelerator,
)
from gpipe.planning.ledger import Work
from tests.planning.small_profiles import LOSS


def test_an_operation_is_bound_by_arithmetic_or_by_memory() -> None:
    speed = Speed(10.0, 5.0, 100.0, 1.0)
    profile = replace(LOSS, forward=(Work(50, 100), Work(5, 1000)), backward=(Work(0, 200),))
    assert speed.seconds([profile, profile]) == [LayerSeconds(10.0 + 10.0, 10.0 + 10.0, 2.0)] * 2


def test_every_operation_takes_its_time_to_start_and_longer_on_a_slower_accelerator() -> None:
    speed = Speed(10.0, 5.0, 100.0, 1.0, operation_seconds=3.0)
    profile = replace(LOSS, forward=(Work(50, 100), Work(5, 1000)), backward=(Work(0, 200),))
    assert speed.seconds([profile]) == [LayerSeconds(26.0, 26.0, 5.0)]
    assert slow_down(speed, 2).seconds([profile]) == [LayerSeconds(52.0, 52.0, 10.0)]


def test_a_host_that_starts_operations_ahead_bounds_small_layers_alone() -> None:
    speed = Speed(10.0, 5.0, 100.0, 1.0, operation_seconds=3.0, starts_ahead=True)
    profile = replace(LOSS, forward=(Work(50, 100), Work(5, 1000)), backward=(Work(0, 200), Work(0, 100)))
    assert speed.seconds([profile]) == [LayerSeconds(20.0, 20.0, 6.0)]
    assert slow_down(speed, 2).seconds([profile]) == [LayerSeconds(40.0, 40.0, 12.0)]


def test_a_message_takes_its_bytes_and_a_hop_and_none_takes_nothing() -> None:
    speed = Speed(10.0, 5.0, 100.0, 4.0, hop_seconds=3.0, task_seconds=7.0)
    assert speed.transfer_seconds(20) == 8.0
    assert slow_down(speed, 2).transfer_seconds(20) == 16.0
    assert slow_down(speed, 2).task_seconds == 14.0
    assert speed.transfer_seconds(0) == 0.0


@pytest.mark.parametrize("name", ACCELERATORS)
def test_no_torch_accelerator_starts_a_hundred_thousand_small_operations_per_second_for_nothing(name: str) -> None:
    tiny = replace(LOSS, forward=(Work(1, 1),) * 1000, backward=())
    seconds = Speed.of(find_accelerator(name), "float32").seconds([tiny])[0].forward
    assert seconds >= 1000 * find_accelerator(name).operation_seconds
    assert (seconds >= 0.01) == (not name.startswith("tpu"))  # XLA compiles what a TPU runs into one program


def test_accelerators_are_found_by_name() -> None:
    assert find_accelerator("tpu_v2").memory_bytes == 8 * 2**30
    assert list(ACCELERATORS) == [
        "tpu_v2",
        "tpu_v3",
        "p40",
        "p100",
        "v100",
        "a100_40gb",
        "a100",
        "h100_pcie",
        "h100",
        "h200",
        "cpu",
    ]
    for accelerator in ACCELERATORS.values():
        assert isinstance(accelerator, Accelerator)
        assert accelerator.bfloat16_flops >= accelerator.float32_flops


def test_an_unknown_accelerator_is_refused_with_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"^device is tpu_v9, expected auto or one of tpu_v2, .*, cpu: set device="
    ) as caught:
        find_accelerator("tpu_v9")
    assert "\n" not in str(caught.value)


def test_an_accelerator_may_have_other_figures() -> None:
    device = find_accelerator("h100").with_limits(memory_gib=40, link_gb_per_second=6)
    assert (device.memory_bytes, device.link_bandwidth) == (40 * 2**30, 6e9)
    assert find_accelerator("h100").with_limits(memory_gib=None, link_gb_per_second=None) == find_accelerator("h100")


@pytest.mark.parametrize(
    ("title", "name", "like"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie", "h100_pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb", "a100_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100", "a100"),
        ("Tesla V100-SXM2-16GB", "v100", "v100"),
        ("NVIDIA RTX A1000", "NVIDIA RTX A1000, planned as a100", "a100"),
    ],
)
def test_the_gpu_at_hand_is_known_by_its_name_and_has_its_own_memory(
    monkeypatch: pytest.MonkeyPatch, title: str, name: str, like: str
) -> None:
    gpu = SimpleNamespace(name=title, total_memory=7 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert detect_accelerator("cuda") == replace(find_accelerator(like), name=name, memory_bytes=7 * 2**30)


def test_without_a_gpu_the_nominal_processor_is_at_hand() -> None:
    assert detect_accelerator("cpu") == find_accelerator("cpu")


def test_a_precision_is_one_that_is_known() -> None:
    with pytest.raises(ValueError, match=r"^precision is 'fp32', expected one of float32, bfloat16, float16\.$"):
        Speed.of(ACCELERATORS["h100"], "fp32")
