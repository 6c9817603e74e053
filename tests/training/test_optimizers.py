"""Optimisers against their formulas, and their state under parameter names."""

import pytest
import torch
from torch import nn

from gpipe.training.optimizers import (
    build_optimizer,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)

# isort: split
import timm

NAMES = ("rmsprop", "sgd", "adamw", "adafactor")


def small_layers(seed: int = 0) -> nn.Sequential:
    """A kernel, its bias, a batch norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double()


def set_gradients(module: nn.Module, seed: int) -> None:
    """Give every trained parameter a random gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_rmsprop_is_tensorflows_with_epsilon_inside_the_root() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = build_optimizer("rmsprop", [("layers.0.bias", parameter)], 0.1, decay=0.9, momentum=0.8, epsilon=0.5)
    value, square, buffer = parameter.detach().clone(), torch.ones(2).double(), torch.zeros(2).double()
    for gradient in (torch.tensor([0.3, 4.0]).double(), torch.tensor([-1.0, 0.5]).double()):
        parameter.grad = gradient.clone()
        optimizer.step()
        square = 0.9 * square + 0.1 * gradient**2
        buffer = 0.8 * buffer + 0.1 * gradient / (square + 0.5).sqrt()
        value = value - buffer
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-14, atol=0)


def test_adafactor_keeps_a_row_and_a_column_of_a_kernel() -> None:
    kernel, bias = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))
    optimizer = build_optimizer("adafactor", [("0.weight", kernel), ("0.bias", bias)], 0.01)
    kernel.grad, bias.grad = torch.randn(8, 3), torch.randn(3)
    optimizer.step()
    shapes = {name: tuple(value.shape) for name, value in optimizer_state(optimizer).items()}
    assert shapes["0.weight/row_var"] == (8, 1) and shapes["0.weight/col_var"] == (1, 3)
    assert sum(value.numel() for value in optimizer_state(optimizer).values() if value.ndim > 0) == 8 + 3 + 3


def test_the_first_step_of_adafactor_is_its_formula() -> None:
    kernel = nn.Parameter(torch.tensor([[3.0, -4.0], [0.5, 1.0]], dtype=torch.float64))
    gradient = torch.tensor([[0.1, 0.2], [-0.4, 0.3]], dtype=torch.float64)
    before = kernel.detach().clone()
    optimizer = build_optimizer("adafactor", [("0.weight", kernel)], 0.01)
    kernel.grad = gradient.clone()
    optimizer.step()
    square = gradient**2  # in the first step the mean squares are the gradient's own
    factored = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    update = gradient / factored.sqrt()
    update = update / max(1.0, update.square().mean().sqrt().item())
    scale = 0.01 * before.square().mean().sqrt()
    torch.testing.assert_close(kernel.detach(), before - scale * update, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_only_kernels_decay(name: str) -> None:
    module = small_layers()
    optimizer = build_optimizer(name, module.named_parameters(), 0.1, weight_decay=0.5)
    before = {key: value.detach().clone() for key, value in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, before[key]) == (parameter.ndim == 1), key


def test_rmsprop_adds_the_decay_to_the_gradient() -> None:
    decayed, plain = small_layers(), small_layers()
    kernel, oracle = decayed[0].weight, plain[0].weight
    set_gradients(decayed, 1)
    oracle.grad = kernel.grad + 0.25 * oracle.detach()
    build_optimizer("rmsprop", decayed.named_parameters(), 0.1, weight_decay=0.25).step()
    build_optimizer("rmsprop", plain.named_parameters(), 0.1).step()
    torch.testing.assert_close(kernel, oracle, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_goes_by_name_and_continues_bitwise(name: str) -> None:
    first = small_layers()
    optimizer = build_optimizer(name, first.named_parameters(), 0.1, weight_decay=0.01)
    set_gradients(first, 1)
    optimizer.step()
    state = {key: value.clone() for key, value in optimizer_state(optimizer).items()}
    assert {key.rsplit("/", 1)[0] for key in state} == {key for key, _ in first.named_parameters()}

    second = small_layers(seed=1)
    second.load_state_dict(first.state_dict())
    # The parameters in another order: the state belongs to names, not to places.
    resumed = build_optimizer(name, reversed(list(second.named_parameters())), 0.1, weight_decay=0.01)
    load_optimizer_state(resumed, state)
    for module, continued in ((first, optimizer), (second, resumed)):
        set_gradients(module, 2)
        continued.step()
    for (key, parameter), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, other), key


@pytest.mark.parametrize("name", ["adan", "lamb", "adamp", "adabelief", "laprop", "mars", "radam", "nadam", "lion"])
def test_an_optimiser_of_timm_continues_bitwise_whatever_it_counts(name: str) -> None:
    """Some keep Python's numbers, and some count per group of parameters."""
    first = small_layers()
    optimizer = timm.optim.create_optimizer_v2(first.named_parameters(), opt=name, lr=0.1)
    for seed in (1, 2, 3):
        set_gradients(first, seed)
        optimizer.step()
    state = {key: value.clone() for key, value in optimizer_state(optimizer).items()}
    second = small_layers(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = timm.optim.create_optimizer_v2(second.named_parameters(), opt=name, lr=0.1)
    load_optimizer_state(resumed, state)
    load_optimizer_state(optimizer, state)
    for seed in (4, 5):
        for module, continued in ((first, optimizer), (second, resumed)):
            set_gradients(module, seed)
            continued.step()
    for (key, parameter), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, other), key
    third = small_layers()
    whole = timm.optim.create_optimizer_v2(third.named_parameters(), opt=name, lr=0.1)
    for seed in (1, 2, 3, 4, 5):
        set_gradients(third, seed)
        whole.step()
    for (key, parameter), other in zip(third.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(parameter, other), key


def test_loading_copies_the_state() -> None:
    module = small_layers()
    optimizer = build_optimizer("rmsprop", module.named_parameters(), 0.1)
    set_gradients(module, 1)
    optimizer.step()
    state = optimizer_state(optimizer)
    other = build_optimizer("rmsprop", module.named_parameters(), 0.1)
    load_optimizer_state(other, state)
    before = {key: value.clone() for key, value in optimizer_state(other).items()}
    optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in optimizer_state(other).items())


def test_frozen_parameters_are_left_out() -> None:
    module = small_layers()
    module[1].requires_grad_(False)
    optimizer = build_optimizer("sgd", module.named_parameters(), 0.1)
    set_gradients(module, 1)
    optimizer.step()
    assert {key.split("/")[0] for key in optimizer_state(optimizer)} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_without_parameters_has_an_optimizer(name: str) -> None:
    optimizer = build_optimizer(name, nn.ReLU().named_parameters(), 0.1)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert optimizer_state(optimizer) == {}


def test_the_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer("sgd", small_layers().named_parameters(), 0.1)
    set_learning_rate(optimizer, 0.025)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]


def test_an_optimizer_without_names_is_refused() -> None:
    optimizer = torch.optim.SGD(small_layers().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="does not know its parameters' names"):
        optimizer_state(optimizer)
