"""The norm of all gradients is so exact that the stages' boundaries leave no trace in it."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from gpipe.pipeline.step_end.gradient_norm import (
    compute_norms,
    global_norm,
    name_parameters,
    scale_gradients,
    sort_by_layer,
)


def parameters(*gradients: torch.Tensor | None) -> list[tuple[str, nn.Parameter]]:
    """Return named parameters with these gradients."""
    named = []
    for i, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        named.append((f"p{i}", parameter))
    return named


def test_each_parameter_with_a_gradient_has_its_norm_in_order() -> None:
    named = parameters(torch.tensor([3.0, 4.0]), None, torch.tensor([[5.0], [12.0]]), torch.zeros(2))
    assert compute_norms(named) == [("p0", 5.0), ("p2", 13.0), ("p3", 0.0)]


def test_numbers_that_are_read_beside_the_norms_come_after_them() -> None:
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in (("p0", 7.0), ("other", 8.0))}
    named = parameters(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]))
    assert compute_norms(named, numbers) == [("p0", 5.0), ("p1", 10.0), ("p0", 7.0), ("other", 8.0)]


def test_gradients_of_several_types_have_norms() -> None:
    gradient = torch.tensor([3.0, 4.0])
    named = parameters(gradient, gradient.double(), gradient.bfloat16())
    assert [norm for _, norm in compute_norms(named)] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 6e4), (torch.bfloat16, 3.0), (torch.bfloat16, 3e38), (torch.float32, 1e30)]
)
def test_finite_gradients_have_a_finite_norm(dtype: torch.dtype, value: float) -> None:
    gradient = torch.full((300,), value, dtype=dtype)
    ((_, norm),) = compute_norms(parameters(gradient))
    assert norm == pytest.approx(float(gradient[0]) * math.sqrt(300), rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_has_no_finite_norm(value: float) -> None:
    ((_, norm),) = compute_norms(parameters(torch.tensor([1.0, value], dtype=torch.float16)))
    assert not math.isfinite(norm)


def test_without_gradients_the_norm_is_zero() -> None:
    assert compute_norms(parameters(None, None)) == []
    assert global_norm([]) == 0.0


def test_norms_of_all_processes_are_in_the_order_of_layers() -> None:
    first, second = [("layers.2.b", 1.0), ("layers.2.a", 2.0), ("layers.10.a", 3.0)], [("layers.3.a", 4.0)]
    assert [norm for _, norm in sort_by_layer([first, second])] == [1.0, 2.0, 4.0, 3.0]


def test_the_norm_does_not_depend_on_the_order() -> None:
    source = random.Random(0)
    norms = [("p", 10.0 ** source.uniform(-8, 3)) for _ in range(200)]
    found = set()
    for _ in range(20):
        source.shuffle(norms)
        found.add(global_norm(norms))
    assert len(found) == 1


def test_the_norm_is_that_of_all_gradients_together() -> None:
    gradients = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    found = global_norm(compute_norms(parameters(*gradients)))
    assert math.isclose(found, float(torch.cat(gradients).norm()), rel_tol=1e-15)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_names_the_first_parameter(value: float) -> None:
    with pytest.raises(ValueError, match=f"^the gradient of layers.1.weight has the norm {value}$"):
        global_norm([("layers.0.weight", 1.0), ("layers.1.weight", value), ("layers.2.weight", math.nan)])


def test_gradients_above_the_norm_shrink_to_it() -> None:
    named = parameters(torch.tensor([3.0, 4.0], dtype=torch.float64), None, torch.tensor([12.0], dtype=torch.float64))
    scale_gradients([p for _, p in named], 6.5, 13.0)
    torch.testing.assert_close(named[0][1].grad, torch.tensor([1.5, 2.0], dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(named[2][1].grad, torch.tensor([6.0], dtype=torch.float64), rtol=1e-6, atol=0)


def test_gradients_below_the_norm_are_left_as_they_are() -> None:
    gradient = torch.tensor([0.3, 0.4])
    scale_gradients([p for _, p in parameters(gradient)], 0.6, 0.5)
    assert torch.equal(gradient, torch.tensor([0.3, 0.4]))


def test_parameters_have_the_names_and_the_order_that_torch_gives_them() -> None:
    shared = nn.Linear(2, 2)
    block = nn.Sequential(shared, nn.BatchNorm1d(2), nn.Sequential(shared, nn.Linear(2, 3, bias=False)))
    block[1].register_parameter("none", None)
    block.register_parameter("own", nn.Parameter(torch.zeros(1)))
    block[2][1].register_parameter("again", shared.weight)
    layers = nn.ModuleDict({"3": block, "10": nn.Linear(3, 3), "11": nn.Identity()})
    found = name_parameters(layers)
    assert list(found.items()) == list(layers.named_parameters(prefix="layers"))


def test_a_module_that_is_none_has_no_parameters() -> None:
    layer = nn.Linear(2, 2)
    layer.register_module("none", None)
    assert [*name_parameters(nn.ModuleDict({"0": layer}))] == ["layers.0.weight", "layers.0.bias"]
