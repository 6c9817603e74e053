"""Each layer gets its own copy of a tied parameter, and all copies begin with the values of the first."""

from __future__ import annotations

import copy
import re
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gpipe
from gpipe.pipeline.shared.tied_parameters import TiedParameters
from tests.support.process_pool import ProcessPool
from tests.support.tied_model import MATRIX, TABLE, loss, mini_batch, tied_layers

CUTS = ((6,), (3, 3), (1, 4, 1), (1, 1, 1, 1, 1, 1))


def pipeline_of(layers: nn.Sequential, partitions: Any = None, **options: Any) -> gpipe.Pipeline:
    return gpipe.Pipeline(layers, loss, partitions or [len(layers)], 2, timeout_seconds=10, **options)


def state_of(pipeline: gpipe.Pipeline) -> dict[str, Tensor]:
    return {f"layers.{name}": value for name, value in pipeline.layers.state_dict().items()}


def test_layers_built_on_a_device_keep_the_values_that_they_have() -> None:
    expected = {f"layers.{name}": value for name, value in tied_layers().state_dict().items()}
    for partitions in CUTS:
        pipeline = pipeline_of(tied_layers(), partitions)
        found = state_of(pipeline)
        assert pipeline.ties == (TABLE, MATRIX)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        memory = [parameter.data_ptr() for parameter in pipeline.parameters()]
        assert len(memory) == len(set(memory)) == len(expected)
        assert dict(pipeline.named_parameters()).keys() == expected.keys()


def untied_state() -> dict[str, Tensor]:
    """Return what the layers draw where none shares anything; two of them cannot draw their table."""
    first, block, last = nn.Embedding(9, 6, device="meta"), tied_layers("meta")[1], nn.Linear(6, 9, device="meta")
    behind = nn.Sequential(nn.LayerNorm(6, device="meta"), nn.Linear(6, 6, device="meta"))
    untied = nn.Sequential(first, block, nn.Identity(), nn.Identity(), behind, last).double()
    return state_of(pipeline_of(untied, seed=5))


def test_described_layers_begin_with_what_the_first_one_draws() -> None:
    expected = untied_state()
    for partitions in CUTS:
        found = state_of(pipeline_of(tied_layers("meta"), partitions, seed=5))
        for names in (TABLE, MATRIX):
            assert all(torch.equal(found[name], expected[names[0]]) for name in names)
        for name in found.keys() - {*TABLE, *MATRIX}:
            assert torch.equal(found[name], expected[name]), name


def describe_in_process(rank: int, partitions: tuple[int, ...]) -> tuple[dict[str, Tensor], list[bool]]:
    mesh = init_device_mesh("cpu", (len(partitions),), mesh_dim_names=("stage",))
    layers = tied_layers("meta")
    generator_state = torch.get_rng_state()
    pipeline = pipeline_of(layers, partitions, mesh=mesh, seed=5)
    assert torch.equal(torch.get_rng_state(), generator_state), "the user's generator was disturbed"
    pipeline.close()
    return state_of(pipeline), [next(layer.parameters()).is_meta for layer in layers]


def test_a_process_draws_what_it_needs_and_no_other_stages_layers(processes: ProcessPool) -> None:
    expected = state_of(pipeline_of(tied_layers("meta"), seed=5))
    for partitions in ((3, 3), (1, 1, 3, 1)):
        first = 0
        for rank, (state, is_meta) in enumerate(processes.run(len(partitions), describe_in_process, partitions)):
            assert all(torch.equal(value, expected[name]) for name, value in state.items())
            assert is_meta == [not first <= index < first + partitions[rank] for index in range(6)]
            first += partitions[rank]


def test_layers_that_went_through_a_pipeline_are_still_tied() -> None:
    layers = tied_layers()
    first = pipeline_of(layers)
    first.train_step(mini_batch(0))
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    with torch.no_grad():
        layers[5].weight += 1  # somebody's mistake: the first one decides
    again = pipeline_of(layers, [2, 4])
    assert again.ties == (TABLE, MATRIX)
    assert torch.equal(layers[5].weight, layers[0].weight)
    assert layers[5].weight is not layers[0].weight


def test_copies_of_layers_that_went_through_a_pipeline_are_tied_to_each_other() -> None:
    layers = tied_layers()
    pipeline_of(layers)
    assert pipeline_of(copy.deepcopy(layers)).ties == (TABLE, MATRIX)
    both = nn.Sequential(*layers, *copy.deepcopy(layers))
    assert [len(group) for group in TiedParameters(both).groups] == [len(TABLE), len(MATRIX)] * 2


def test_layers_that_went_through_a_pipeline_are_tied_in_other_layers_too() -> None:
    layers = tied_layers()
    pipeline_of(layers)
    grouped = nn.Sequential(layers[:3], layers[3:])
    assert [len(group) for group in TiedParameters(grouped).groups] == [len(TABLE), len(MATRIX)]
    pipeline_of(grouped)
    assert pipeline_of(nn.Sequential(*grouped[0], *grouped[1])).ties == (TABLE, MATRIX)


def test_what_one_layer_has_twice_stays_one_parameter() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            layers = nn.Sequential(
                nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Bilinear(3, 3, 3), nn.Linear(3, 3)
            )
        layers[1][1].weight = layers[1][0].weight
        layers[2].bias = layers[1][0].bias = layers[1][1].bias
        layers[3].weight = layers[1][0].weight
        pipeline = pipeline_of(layers)
        inside = pipeline.layers["1"]
        assert inside[0].weight is inside[1].weight and inside[0].bias is inside[1].bias
        assert pipeline.ties == (("layers.1.0.weight", "layers.3.weight"), ("layers.1.0.bias", "layers.2.bias"))
        assert torch.equal(layers[3].weight, inside[0].weight) and layers[3].weight is not inside[0].weight

        alone = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))).to(device)
        alone[1][1].weight = alone[1][0].weight
        assert pipeline_of(alone).ties == ()
        assert alone[1][1].weight is alone[1][0].weight and not alone[1][0].weight.is_meta


def test_a_later_layer_that_has_the_parameter_twice_keeps_one_copy() -> None:
    first, later = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    later[0].weight = later[1].weight = first.weight
    pipeline = pipeline_of(nn.Sequential(first, later), [1, 1])
    assert pipeline.ties == (("layers.0.weight", "layers.1.0.weight"),)
    assert later[0].weight is later[1].weight is not first.weight
    assert torch.equal(later[0].weight, first.weight)


class Around(nn.Module):
    """Has a module that may be another layer's too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.again = inner, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.again(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_in_two_layers_becomes_two(device: str) -> None:
    def model() -> nn.Sequential:
        with torch.device(device):
            linear, tanh = nn.Linear(3, 3), nn.Tanh()
            return nn.Sequential(linear, tanh, Around(linear), tanh, linear)

    values = []
    for partitions in ([5], [1, 2, 2], [1, 1, 1, 1, 1]):
        torch.manual_seed(0)
        layers = model()
        pipeline = pipeline_of(layers, partitions)
        assert layers[0] is not layers[2].inner is not layers[4] is not layers[0]
        assert layers[2].inner is layers[2].again
        assert layers[1] is layers[3], "what has no parameters may stand in two places"
        weights = ("layers.0.weight", "layers.2.inner.weight", "layers.4.weight")
        assert pipeline.ties == (weights, tuple(name.replace("weight", "bias") for name in weights))
        state = state_of(pipeline)
        assert all(torch.equal(state[name], state[weights[0]]) for name in weights)
        values.append(state[weights[0]])
    assert torch.equal(values[0], values[1]) and torch.equal(values[1], values[2])


def test_a_batch_norm_in_two_layers_is_refused() -> None:
    norm = nn.BatchNorm1d(3)
    layers = gpipe.convert_batch_norm(nn.Sequential(norm, nn.Linear(3, 3), nn.Sequential(nn.Tanh(), norm)))
    message = (
        "layers.0 and layers.2.1 are one batch norm, whose moving averages two layers cannot share; give each its own"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pipeline_of(layers)


def test_costs_count_a_copy_in_each_layer_and_the_model_once() -> None:
    for device in ("cpu", "meta"):
        layers = tied_layers(device)
        costs = gpipe.analyze_layers(layers, mini_batch(0)[0])
        own = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        assert [cost.parameters for cost in costs] == own
        assert [cost.parameter_bytes for cost in costs] == [8 * number for number in own]
        assert [cost.tied_parameters for cost in costs] == [0, 0, 54, 54, 36, 54]
        total = sum(cost.parameters - cost.tied_parameters for cost in costs)
        assert total == sum(parameter.numel() for parameter in tied_layers().parameters())


def test_a_tied_group_is_found_once_for_any_number_of_layers() -> None:
    assert [[member.full_name for member in group] for group in TiedParameters(tied_layers("meta")).groups] == [
        [*TABLE],
        [*MATRIX],
    ]
    assert TiedParameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).groups == ()


def test_a_copy_has_the_attributes_of_the_parameter() -> None:
    layers = tied_layers()
    layers[0].weight.no_decay = True
    pipeline = pipeline_of(layers)
    named = dict(pipeline.named_parameters())
    assert {name for name, parameter in named.items() if getattr(parameter, "no_decay", False)} == set(TABLE)


def test_parameters_in_the_same_memory_are_one() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    layers[2].weight.data = layers[0].weight.data
    pipeline = gpipe.Pipeline(layers, nn.functional.mse_loss, [2, 1], 2)
    assert pipeline.ties == (("layers.0.weight", "layers.2.weight"),)
    assert layers[2].weight.data_ptr() != layers[0].weight.data_ptr() and torch.equal(
        layers[2].weight, layers[0].weight
    )


def test_a_tied_parameter_has_gradients_of_its_own_type() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(torch.bfloat16)
    layers[1].weight = layers[0].weight
    layers[0].weight.grad_dtype = torch.float32
    with pytest.raises(ValueError, match=r"^layers.0.weight has the type torch.bfloat16, but its gradient, of which"):
        gpipe.Pipeline(layers, nn.functional.mse_loss, [1, 1], 2)


@pytest.mark.parametrize("is_first_frozen", [False, True])
def test_a_frozen_parameter_in_the_memory_of_a_trained_one_stays_frozen(is_first_frozen: bool) -> None:
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    layers[1].weight = nn.Parameter(layers[0].weight.data, requires_grad=is_first_frozen)
    layers[0].weight.requires_grad_(not is_first_frozen)
    plain = copy.deepcopy(layers)
    batch = torch.ones(2, 3), torch.zeros(2, 3)
    gpipe.Pipeline(layers, nn.functional.mse_loss, [1, 1], 1).train_step(batch)
    nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
    for own, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) is (expected.grad is None)
        assert own.grad is None or torch.equal(own.grad, expected.grad)


def overlap(rank: int) -> str:
    memory = torch.randn(15)
    layers = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    layers[0].weight.data, layers[2].weight.data = memory[:9].view(3, 3), memory[6:].view(3, 3)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
    with pytest.raises(ValueError, match="share memory") as error:
        gpipe.Pipeline(layers, nn.functional.mse_loss, [1, 2], 2, mesh=mesh, timeout_seconds=10)
    gpipe.Pipeline(layers, nn.functional.mse_loss, [1, 2], 2)
    return str(error.value)


def test_parameters_of_two_processes_that_share_a_part_of_their_memory_are_refused(processes: ProcessPool) -> None:
    for message in processes.run(2, overlap):
        assert message.startswith("layers.0.weight and layers.2.weight share memory, but are not one parameter, so one")


class Borrow(nn.Module):
    """Has another module's weight, and cannot draw any."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_a_layer_that_is_drawn_for_its_values_gets_those_that_it_borrows_itself() -> None:
    def build(*indices: int) -> Tensor:
        with torch.device("meta"):
            first, second = nn.Linear(3, 3), nn.Linear(3, 3)
            layers = nn.Sequential(first, nn.Sequential(Borrow(first.weight), second), Borrow(second.weight))
        return TiedParameters(layers).build(dict.fromkeys(indices, torch.device("cpu")), 0)[2].weight

    assert torch.equal(build(2), build(0, 1, 2))


def test_parameters_that_lie_between_each_others_elements_are_not_refused() -> None:
    memory = torch.randn(3, 6)
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    layers[0].weight.data, layers[1].weight.data = memory[:, ::2], memory[:, 1::2]
    assert [*TiedParameters(layers).build({0: torch.device("cpu")}, 0)] == [0]


class Wrapping(Tensor):
    """Has no memory of its own, as quantised weights and those of several devices have none."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, wrapped: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)

    def __init__(self, wrapped: Tensor) -> None:
        self.wrapped = wrapped

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].wrapped) if function is torch.ops.aten.detach.default else NotImplemented


def test_parameters_without_memory_of_their_own_share_none() -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in layers:
        layer.weight = nn.Parameter(Wrapping(torch.ones(3, 3)))
    TiedParameters(layers).build({0: torch.device("cpu")}, 0)  # as the first of two processes does
