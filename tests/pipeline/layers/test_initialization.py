"""Initial weights are a function of (seed, layer index), and nothing stays unfilled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.pipeline.layers.initialization import materialize

CPU = torch.device("cpu")


class Scale(nn.Module):
    """Has a parameter and no way to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Table(nn.Module):
    """Fills its parameter but forgets its buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4).to(dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class ZeroGamma(nn.Module):
    """Starts its batch norm at zero, after the batch norm has reset itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.norm.weight)


def described() -> nn.Sequential:
    """Describe a model; two of its layers are alike."""
    with torch.device("meta"):
        layers = nn.Sequential(
            nn.Linear(3, 4), nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Linear(4, 4)
        )
    assert isinstance(layers, nn.Sequential)
    gpipe.convert_batch_norm(layers)
    return layers


def state(partitions: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Return what a pipeline makes of the description."""
    return gpipe.Pipeline(described(), nn.functional.cross_entropy, partitions, seed=seed).layers.state_dict()


def test_weights_do_not_depend_on_the_partitions() -> None:
    expected = state([4])
    for partitions in ([1, 3], [2, 2], [1, 1, 2], [1, 1, 1, 1]):
        found = state(partitions)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_a_layer_alone_gets_the_weights_that_it_has_in_the_model() -> None:
    alone = materialize(described()[2], 2, 0, CPU).state_dict()
    for name, value in alone.items():
        assert torch.equal(state([4])[f"2.{name}"], value), name


def test_weights_depend_on_the_seed_and_on_the_layer() -> None:
    weights = [state([4], seed)[f"{index}.weight"] for seed in (0, 1) for index in (1, 3)]
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 4


def test_the_generator_does_not_notice() -> None:
    before = torch.get_rng_state()
    state([4])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_decides_nothing() -> None:
    torch.manual_seed(1)
    first = state([4])
    torch.manual_seed(2)
    assert all(torch.equal(first[name], value) for name, value in state([4]).items())


def test_weights_are_those_that_reset_parameters_draws() -> None:
    layer = materialize(described()[0], 0, 0, CPU)
    assert float(layer.weight.detach().abs().max()) <= 3**-0.5  # nn.Linear's bound
    norm = materialize(described()[2], 2, 0, CPU)[0]
    assert norm.weight.tolist() == norm.running_var.tolist() == [1.0] * 4
    assert norm.bias.tolist() == norm.running_mean.tolist() == [0.0] * 4
    assert norm.num_batches_tracked.item() == 0


def test_a_parent_has_the_last_word_as_when_it_was_made() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(ZeroGamma(), nn.MultiheadAttention(4, 2))
    assert materialize(layers[0], 0, 0, CPU).norm.weight.tolist() == [0.0, 0.0]
    assert materialize(layers[1], 1, 0, CPU).out_proj.bias.tolist() == [0.0] * 4  # else it is drawn


def test_a_materialised_model_is_taken_as_it_is() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), Scale())
    weight, value = layers[0].weight, layers[0].weight.clone()
    pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, [1, 1])
    assert pipeline.layers["0"].weight is weight
    assert torch.equal(weight, value)


def test_layers_with_and_without_memory_may_be_mixed() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, device="meta"))
    value = layers[0].weight.clone()
    pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, [2])
    assert torch.equal(pipeline.layers["0"].weight, value)
    assert not pipeline.layers["1"].weight.is_meta


def test_a_module_that_cannot_fill_its_tensors_is_named() -> None:
    with torch.device("meta"):
        layer = nn.Sequential(nn.ReLU(), Scale())
    with pytest.raises(ValueError, match=r"^layers\.5\.1 \(Scale\) was described on .* has no reset_parameters\(\)"):
        materialize(layer, 5, 0, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.uint8, torch.bool])
def test_a_tensor_that_reset_parameters_forgets_is_named(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        layer = nn.Sequential(Table(dtype))
    with pytest.raises(ValueError, match=r"^layers\.2\.0\.table was .* and no reset_parameters\(\) filled it;"):
        materialize(layer, 2, 0, CPU)


class Angles(Table):
    """Fills its buffer with a tensor that it makes."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.table.copy_(torch.arange(4.0))


def test_a_pipeline_may_be_made_where_new_tensors_are_on_the_meta_device() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(Angles(torch.float32))
        pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, [1])
    assert pipeline.layers["0"].table.tolist() == [0, 1, 2, 3]


def test_a_layer_that_is_partly_filled_is_refused_before_anything_is_lost() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    value = layer[0].weight.clone()
    with pytest.raises(ValueError, match=r"^layers\.0\.0\.weight has memory, but other tensors of layers\.0 are"):
        materialize(layer, 0, 0, CPU)
    assert torch.equal(layer[0].weight, value)


def test_a_module_that_cannot_fill_its_whole_numbers_is_named() -> None:
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(2, 2), nn.Module())
        layer[1].register_buffer("count", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^layers.3.1 \(Module\) was described on the meta device and has no reset_p"):
        materialize(layer, 3, 0, CPU)


class Filled(Table):
    """Fills its buffer with the largest whole numbers."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.table.fill_(torch.iinfo(self.table.dtype).max)


def test_whole_numbers_may_be_the_largest() -> None:
    with torch.device("meta"):
        layer = Filled(torch.int64)
    assert materialize(layer, 0, 0, CPU).table.tolist() == [2**63 - 1] * 4
