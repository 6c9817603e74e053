"""The moving average against its formula."""

import pytest
import torch
from torch import nn

from gpipe.training.ema import Ema


def layers_of(*modules: nn.Module) -> nn.ModuleDict:
    """Layers as a pipeline holds them, starting at layer 3."""
    return nn.ModuleDict({str(index): module for index, module in enumerate(modules, start=3)})


def change(layers: nn.ModuleDict, value: float) -> None:
    """Set every floating-point tensor to `value`, and count a batch."""
    for tensor in layers.state_dict().values():
        tensor.fill_(value) if tensor.is_floating_point() else tensor.add_(1)


def average(decay: float, values: list[float]) -> float:
    """Return the weighted mean of the values after each step, without the one before the first."""
    weights = [decay ** (len(values) - step) for step in range(1, len(values) + 1)]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def test_weights_and_moving_statistics_are_averaged_without_the_initial_ones_and_counts_copied() -> None:
    layers = layers_of(nn.Linear(2, 2).double(), nn.BatchNorm1d(2).double())
    change(layers, 1e6)
    ema = Ema(layers, decay=0.75)
    values = [3.0, -2.0, 5.0]
    for step, value in enumerate(values, start=1):
        change(layers, value)
        ema.update(step)
        for name, tensor in ema.state().items():
            if tensor.is_floating_point():
                expected = torch.full_like(tensor, average(0.75, values[:step]))
                torch.testing.assert_close(tensor, expected, rtol=1e-14, atol=0)
            else:
                assert tensor == step + 1, name


def test_the_average_of_a_long_run_is_the_usual_one() -> None:
    layers = layers_of(nn.Linear(1, 1).double())
    ema = Ema(layers, decay=0.9)
    expected = 0.0
    for step in range(1, 400):
        change(layers, float(step % 7))
        ema.update(step)
        expected = 0.9 * expected + 0.1 * (step % 7)
    assert ema.state()["layers.3.bias"].item() == pytest.approx(expected, rel=1e-12)


def test_the_warm_up_is_tensorflows_but_for_the_initial_weights() -> None:
    layers = layers_of(nn.Linear(1, 1).double())
    change(layers, 1e6)
    ema = Ema(layers, decay=0.5, warm_up=True)
    expected = 0.0
    for step in range(1, 20):
        change(layers, float(step))
        ema.update(step)
        decay = min(0.5 * (1 - 0.5 ** (step - 1)) / (1 - 0.5**step), (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert ema.state()["layers.3.bias"].item() == pytest.approx(expected, rel=1e-12)


def test_tensors_that_a_layer_has_under_two_names_are_averaged_once() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    layer[1].weight = layer[0].weight
    layer.append(layer[2])
    layers = layers_of(layer)
    ema = Ema(layers, decay=0.75)
    for step, value in enumerate((3.0, -2.0, 5.0), start=1):
        change(layers, value)
        ema.update(step)
    state = ema.state()
    for name in ("0.weight", "1.weight", "1.bias", "2.running_var", "3.running_var"):
        assert state[f"layers.3.{name}"].unique().item() == pytest.approx(average(0.75, [3.0, -2.0, 5.0])), name


def test_names_are_those_of_the_layers() -> None:
    layers = layers_of(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(Ema(layers).state()) == list(layers.state_dict(prefix="layers."))
    assert list(Ema(layers).module) == ["3", "4"]


def test_the_average_is_its_own_model_in_evaluation_mode() -> None:
    layers = layers_of(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    ema = Ema(layers, decay=0.5)
    assert not any(module.training for module in ema.module.modules())
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert layers.training and all(parameter.requires_grad for parameter in layers.parameters())
    change(ema.module, 7.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layers.state_dict().items())


@pytest.mark.parametrize("module", [nn.ReLU(), nn.BatchNorm1d(2, affine=False)])
def test_a_stage_without_parameters_is_averaged(module: nn.Module) -> None:
    layers = layers_of(module)
    ema = Ema(layers, decay=0.5)
    change(layers, 3.0)
    ema.update(1)
    if "layers.3.running_mean" in ema.state():
        assert ema.state()["layers.3.running_mean"].tolist() == [3.0, 3.0]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"decay is 1\.0"):
        Ema(layers_of(nn.Linear(1, 1)), decay=1.0)
    with pytest.raises(ValueError, match=r"layers\.3\.weight is torch\.bfloat16"):
        Ema(layers_of(nn.Linear(1, 1).bfloat16()))
