"""A model that nobody here wrote becomes layers that compute its bits, keep its names, and train in any pipeline."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.tracing.traced_layers import TracedLayers
from tests.tracing.models import MODELS, Parts, build, call, images, tensors_of, two_inputs


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_averages_and_masks_have_the_models_bits_for_any_batch(name: str) -> None:
    model = build(name)
    plain, batch = copy.deepcopy(model), MODELS[name][1]
    layers = gpipe.as_layers(model, batch(1))
    assert len(layers) > 1
    for size in (2, 5):
        expected, found = list(tensors_of(call(plain, batch(size)))), list(tensors_of(call(layers, batch(size))))
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        for outputs in (expected, found):
            sum(output.square().mean() for output in outputs).backward()
    for (key, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (twin.grad is None), key
        assert parameter.grad is None or torch.equal(parameter.grad, twin.grad), key
    for key, value in plain.state_dict().items():
        assert torch.equal(layers.model_state_dict()[key], value), key
    plain.eval(), layers.eval()
    assert all(map(torch.equal, tensors_of(call(layers, batch(4))), tensors_of(call(plain, batch(4)))))


@cache
def record(name: str) -> TracedLayers:
    """Return the layers of a model, to be copied: recording them takes a second."""
    return gpipe.as_layers(build(name), MODELS[name][1](2))


@pytest.mark.parametrize("name", ["ResNet, stochastic depth", "ViT", "DenseNet", "two inputs"])
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_in_a_pipeline_the_number_of_stages_and_the_mode_change_no_bit(name: str, data: st.DataObject) -> None:
    gradients = []
    layers = record(name)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(layers) - 1), max_size=3)))
    partitions = [end - begin for begin, end in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    mode = data.draw(st.sampled_from(["always", "except_last", "never"]))
    for shape, rematerialize in (([len(layers)], "never"), (partitions, mode)):
        own = gpipe.convert_batch_norm(copy.deepcopy(layers))
        pipeline = gpipe.Pipeline(own, loss, shape, 2, rematerialize=rematerialize)
        pipeline.train_step((MODELS[name][1](5), torch.arange(5) % 5))
        gradients.append({key: parameter.grad for key, parameter in pipeline.named_parameters()})
    for key, gradient in gradients[0].items():
        twin = gradients[1][key]
        assert gradient is twin is None or torch.equal(gradient, twin), key


def loss(outputs: Any, targets: Tensor) -> Tensor:
    if isinstance(outputs, dict):
        return outputs["logits"].square().mean() + outputs["first"].mean() + 0 * targets.sum()
    return F.cross_entropy(outputs, targets)


def test_the_models_own_state_dict_is_loaded_and_returned_under_its_own_names() -> None:
    model, other = build("two inputs"), build("two inputs")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    layers = gpipe.as_layers(model, two_inputs())
    layers.load_model_state_dict(other.state_dict())
    found = layers.model_state_dict()
    assert found.keys() == other.state_dict().keys()
    for key, value in other.state_dict().items():
        assert torch.equal(found[key], value) and torch.equal(model.state_dict()[key], value), key
    parts = [layers.model_state_dict(only=own) for own in (["0", "1"], [*map(str, range(2, len(layers)))])]
    assert parts[0].keys() ^ parts[1].keys() == found.keys() and min(map(len, parts)) > 0
    assert layers.names["blocks.2.norm2.weight"].partition(".")[2] == "blocks.2.norm2.weight"
    with pytest.raises(ValueError, match=r"^token is missing \(names that differ: 1\); give this model's state dict$"):
        layers.load_model_state_dict({key: value for key, value in found.items() if key != "token"})
    with pytest.raises(
        ValueError, match=r"^token has the shape \(2,\), but \(1, 1, 8\) in the model; give this model's"
    ):
        layers.load_model_state_dict(found | {"token": torch.zeros(2)})


def test_layers_share_the_models_parameters_and_leave_its_mode_alone() -> None:
    model = build("ResNet").eval()
    model.layer1.train()
    modes = {name: module.training for name, module in model.named_modules()}
    layers = gpipe.as_layers(model, images())
    assert {id(parameter) for parameter in layers.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert not layers.training and {name: module.training for name, module in model.named_modules()} == modes


class Merging(nn.Linear):
    """Adds an update to its weight for evaluation, as LoRA does."""

    def train(self, mode: bool = True) -> Merging:
        self.weight.data += (int(self.training) - int(mode)) * 0.1
        return super().train(mode)


def test_a_model_whose_modes_do_something_is_as_before() -> None:
    model = nn.Sequential(Merging(4, 4), nn.Linear(4, 4)).eval()
    before = copy.deepcopy(model)
    layers, x = gpipe.as_layers(model, torch.randn(2, 4)), torch.randn(5, 4)
    assert torch.equal(model[0].weight, before[0].weight) and torch.equal(layers(x), before(x))


@pytest.mark.parametrize("name", ["two inputs", "GPT-2", "Swin", "numbered examples", "ResNet"])
def test_a_copy_has_the_same_tensors_in_the_same_order_and_computes_the_same(name: str) -> None:
    layers, batch = gpipe.as_layers(build(name), MODELS[name][1](1)), MODELS[name][1](4)
    copies = copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))
    for other in copies:
        assert list(other.state_dict()) == list(layers.state_dict())
        for (own, tensor), (key, twin) in zip(layers.named_buffers(), other.named_buffers(), strict=True):
            assert own == key and torch.equal(tensor, twin) and tensor.data_ptr() != twin.data_ptr()
        assert other.model_names == layers.model_names
    expected = list(tensors_of(call(layers, batch)))
    for other in copies:
        assert all(map(torch.equal, tensors_of(call(other, batch)), expected))


@pytest.mark.parametrize(
    ("name", "names"), [("two inputs", {"embedding.weight"}), ("GPT-2", {"transformer.wte.weight", "lm_head.weight"})]
)
def test_a_tied_parameter_stays_one_in_a_pipeline(name: str, names: set[str]) -> None:
    layers = gpipe.as_layers(build(name), MODELS[name][1](2))
    pipeline = gpipe.Pipeline(layers, loss, [1, len(layers) - 1], 2)
    assert [{name.split(".", 2)[2] for name in tied} for tied in pipeline.ties] == [names]
    assert {layers.model_names[place.removeprefix("layers.")] for tied in pipeline.ties for place in tied} <= names


@pytest.mark.parametrize("name", ["two inputs", "GPT-2"])
def test_a_state_dict_reaches_all_copies_that_a_pipeline_made_of_a_tied_parameter(name: str) -> None:
    model, other = build(name), build(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    layers = gpipe.as_layers(model, MODELS[name][1](2))
    pipeline = gpipe.Pipeline(layers, loss, [1, len(layers) - 1], 1)
    layers.load_model_state_dict(other.state_dict())
    batch = MODELS[name][1](4)
    with torch.no_grad():
        expected = call(gpipe.as_layers(other, batch).eval(), batch)
    assert all(map(torch.equal, tensors_of(pipeline.evaluate(batch)), tensors_of(expected)))


def test_some_of_the_layers_are_a_plain_sequence() -> None:
    layers = gpipe.as_layers(build("ResNet"), images())
    some = layers[1:3]
    assert type(some) is nn.Sequential and list(some) == [layers[1], layers[2]]


class Siamese(nn.Module):
    """Compares two inputs by one network with a batch norm, which sees both."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.judge = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.judge(self.encode(first) - self.encode(second))


def test_no_cut_lies_between_two_uses_of_a_batch_norm() -> None:
    torch.manual_seed(0)
    model = Siamese().double()
    plain = copy.deepcopy(model)
    inputs = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    layers = gpipe.convert_batch_norm(gpipe.as_layers(model, inputs))
    pipeline = gpipe.Pipeline(layers, lambda x, _: x.square().mean(), [1, len(layers) - 1], 1)
    pipeline.train_step((inputs, torch.zeros(6)))
    plain(*inputs).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name
    # One update on both inputs, where the plain layer makes two.
    assert int(model.encode[1].num_batches_tracked) == 1


class Counts(Parts):
    """Counts its forwards, or what a submodule of one operation sees, and uses that more than once."""

    def __init__(self, *, itself: bool) -> None:
        super().__init__()
        self.itself, self.average, self.d = itself, Average(), nn.Linear(4, 4)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.itself:
            self.number += 1
            x = self.b(x) * self.number.clone()
            return self.d(self.c(x + self.number.clone()))
        return self.d(self.c(self.average(self.b(self.average(x)))))


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.value[0] += x.mean(0)
        return x - self.value.sum(0)


@pytest.mark.parametrize("itself", [True, False])
def test_no_cut_lies_between_two_uses_of_a_buffer_that_changes(*, itself: bool) -> None:
    model, x = Counts(itself=itself), torch.randn(6, 4)
    plain, layers = copy.deepcopy(model), gpipe.as_layers(model, x)
    pipeline = gpipe.Pipeline(layers, lambda x, _: x.square().mean(), [1, len(layers) - 1], 1)
    pipeline.train_step((x, torch.zeros(6)))
    plain(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


@dataclass
class Found:
    """Outputs by names."""

    out: Tensor
    more: Tensor
    none: Tensor | None = None


class Nested(nn.Module):
    """Returns its output as a function nests it."""

    def __init__(self, nest: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.nest = nest

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.nest(x)


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: {"a": {"b": x}},
        lambda x: [x],
        lambda x: (x, [x + 1, {"a": (x[:, :2], None)}]),
        lambda x: OrderedDict(out=x, none=None),
        lambda x: Found(x, x + 1),
    ],
)
def test_outputs_are_nested_as_the_models_are(nest: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = Nested(nest), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:3])
    found = gpipe.Pipeline(layers, lambda outputs, _: outputs, [len(layers)], 2).evaluate(x)
    assert len(layers) > 1
    assert_nested_alike(found, model(x))


def assert_nested_alike(found: Any, expected: Any) -> None:
    if isinstance(expected, Found):
        expected = {"out": expected.out, "more": expected.more}
    if isinstance(expected, Tensor):
        assert torch.allclose(found, expected, atol=1e-6)
        return
    assert type(found) is (dict if isinstance(expected, dict) else type(expected))
    if expected is not None:
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_nested_alike(found[key], expected[key])


class OddNames(nn.Module):
    """Has buffers of names that layers give to what they add, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        for number, name in enumerate(("constant_0", "unused_0", "other")):
            self.register_buffer(name, torch.full((3,), 2.0 + number))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * torch.tensor([1.0, 2.0, 3.0]) + self.constant_0

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


def test_parts_of_a_model_may_have_any_name() -> None:
    names = "graph", "code", "meta", "_code", "_names", "_run", "payload"
    model, x = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names)), torch.randn(5, 4)
    model.meta.register_buffer("graph", torch.ones(4))
    layers = gpipe.as_layers(model, x[:2])
    for one in (layers, copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert len(one) > 1 and torch.equal(one(x), model(x))


def test_names_of_a_model_are_its_own_whatever_layers_add() -> None:
    model, x = OddNames(), torch.randn(5, 3)
    layers = gpipe.as_layers(model, x[:2])
    assert torch.equal(layers(x), model(x))
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    found = layers.model_state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    layers.load_model_state_dict(model.state_dict())
