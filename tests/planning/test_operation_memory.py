"""What operations take inside of themselves, beside what torch's own profiler sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.planned_memory.stage_accounting import ProcessorAllocator
from gpipe.planning.operation_memory import OperationMemory

aten = torch.ops.aten


def make_arguments(name: str) -> tuple[Any, ...]:
    images, gradients = torch.randn(4, 16, 32, 32), torch.randn(4, 48, 32, 32)
    weight, bias = torch.randn(48, 16, 3, 3), torch.randn(48)
    ones, zeros = [1, 1], [0, 0]
    return {
        "sum": (images, images),
        "convolution": (images, weight, bias, ones, ones, ones, False, zeros, 1),
        "convolution_backward": (gradients, images, weight, [48], ones, ones, ones, False, zeros, 1, [True] * 3),
    }[name]


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("sum", aten.add.Tensor),
        ("convolution", aten.convolution.default),
        ("convolution_backward", aten.convolution_backward.default),
    ],
)
def test_an_operation_takes_what_the_profiler_sees_and_needs_no_data(name: str, operation: Any) -> None:
    arguments = make_arguments(name)
    allocator = ProcessorAllocator()
    allocator.step(lambda: allocator.task(lambda: operation(*arguments)))
    with FakeTensorMode():
        fakes = make_arguments(name)
        taken = OperationMemory().measure(operation, fakes, {})
    assert taken.peak_bytes == allocator.readings[0].most


def test_the_workspace_of_a_recurrent_layer_has_the_size_that_it_really_has() -> None:
    def arguments() -> tuple[Any, ...]:
        weights = [parameter.detach() for parameter in nn.LSTM(24, 24).parameters()]
        state = torch.zeros(1, 4, 24)
        return (torch.zeros(9, 4, 24), *weights, state, state, False, [], 2, 24, 1, True, False, False, True)

    real = aten.mkldnn_rnn_layer.default(*arguments())
    with FakeTensorMode():
        given = arguments()
        fake = aten.mkldnn_rnn_layer.default(*given)
        completed = OperationMemory().measure(aten.mkldnn_rnn_layer.default, given, {}).complete(fake)
    assert fake[-1].numel() == 0
    assert [tensor.shape for tensor in completed] == [tensor.shape for tensor in real]
    assert completed[-1].dtype == real[-1].dtype and completed[0] is fake[0]


def test_equal_operations_are_measured_once() -> None:
    runs = []

    def add(left: torch.Tensor, right: torch.Tensor, *, alpha: int) -> torch.Tensor:
        runs.append(left.shape)
        return torch.add(left, right, alpha=alpha)

    memory = OperationMemory()
    for size, alpha in ((2, 1), (2, 1), (3, 1), (2, 2)):
        memory.measure(add, (torch.zeros(size), torch.zeros(size)), {"alpha": alpha})
    assert runs == [(2,), (3,), (2,)]


def test_an_operation_that_refuses_zeros_takes_what_is_described() -> None:
    taken = OperationMemory().measure(aten.multinomial.default, (torch.ones(3), 2), {})
    described = torch.zeros(2)
    assert taken.peak_bytes == 0 and taken.complete(described) is described
