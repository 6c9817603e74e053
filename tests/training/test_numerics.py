"""The settings of kernels reach torch, and can be taken back."""

import os

import pytest
import torch

from gpipe.training.numerics import set_numerics
from tests.support.process_pool import ProcessPool


@pytest.fixture(autouse=True)
def _without_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def scatter() -> None:
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))  # which of the two stays is left open


def test_deterministic_refuses_what_has_no_kernel_of_that_kind() -> None:
    set_numerics(deterministic=True, float32_matmul_precision="highest", tries_kernels=True)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        scatter()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_numerics(deterministic=False, float32_matmul_precision="highest")
    scatter()
    assert not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("tries", [True, False])
def test_cudnn_tries_kernels_where_it_may(tries: bool) -> None:
    set_numerics(deterministic=False, float32_matmul_precision="highest", tries_kernels=tries)
    assert torch.backends.cudnn.benchmark is tries


@pytest.mark.parametrize(("precision", "has_tf32"), [("highest", False), ("high", True), ("medium", True)])
def test_the_precision_of_products_is_that_of_convolutions_too(precision: str, has_tf32: bool) -> None:
    set_numerics(deterministic=False, float32_matmul_precision=precision)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 == has_tf32


def are_deterministic(rank: int) -> bool:
    return torch.are_deterministic_algorithms_enabled()


def test_tests_take_deterministic_kernels(processes: ProcessPool) -> None:
    assert [are_deterministic(0), *processes.run(2, are_deterministic)] == [True] * 3
