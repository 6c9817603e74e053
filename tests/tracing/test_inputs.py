"""A model that was cut takes what its example was, nested so."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.tracing.errors import TracingError
from tests.tracing.models import Parts, build, images


@pytest.mark.parametrize(
    ("example", "inputs", "said"),
    [
        ((torch.zeros(2, 3),), torch.zeros(2, 3), "a tensor, but the example was a tuple of 1"),
        ((torch.zeros(2, 3),), (torch.zeros(2, 3),) * 2, "a tuple of 2, but the example was a tuple of 1"),
        (torch.zeros(2, 3), (torch.zeros(2, 3),), "a tuple of 1, but the example was a tensor"),
        ({"input": torch.zeros(2, 3)}, {"y": torch.zeros(2, 3)}, "a dict of y, but the example was a dict of input"),
    ],
)
def test_inputs_that_are_nested_in_another_way_than_the_example_are_refused(
    example: Any, inputs: Any, said: str
) -> None:
    layers = gpipe.as_layers(nn.Sequential(nn.Linear(3, 3)), example)
    with pytest.raises(ValueError, match=rf"^the model's input is {said}; give it like the example$"):
        layers(inputs)


class Masked(nn.Module):
    """Has an argument that may be left out, decides by dimensions, and may take any others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x if x.ndim == 2 else x.sum(1))
        return self.last(x if mask is None else x * mask)


class Open(Masked):
    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return super().forward(x, **more)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("kind", "example", "inputs", "said"),
    [
        (
            Masked,
            {"x": X},
            {"x": X, "mask": X},
            "the model's input is a dict of x, mask, but .* a dict of x; give it like the example",
        ),
        (
            Open,
            {"x": X},
            {"x": X, "mask": X},
            "the model's input is a dict of x, mask, but .* a dict of x; give it like the example",
        ),
        (Masked, (X, None), (X, X), "input 1 is a tensor, but the example was None; give it like the example"),
        (
            Masked,
            {"x": X, "mask": X},
            {"x": X, "mask": None},
            "mask is None, but the example was a tensor; give it like the example",
        ),
        (
            Masked,
            X,
            torch.ones(2, 4, 3),
            "the model's input has ndim 3, but the example had ndim 2; give the same number of dimensions",
        ),
        (
            Masked,
            (X, X),
            (X, X[0]),
            "input 1 has ndim 1, but the example had ndim 2; give the same number of dimensions",
        ),
    ],
)
def test_what_the_layers_would_ignore_or_take_for_something_else_is_refused(
    kind: type[nn.Module], example: Any, inputs: Any, said: str
) -> None:
    layers = gpipe.as_layers(kind(), example)
    with pytest.raises(ValueError, match=f"^{said}$"):
        layers(inputs)


def test_entries_that_are_no_arguments_of_the_model_may_stay() -> None:
    model, x = Masked(), torch.randn(5, 3)
    layers = gpipe.as_layers(model, {"x": X})
    assert torch.equal(layers({"label": X, "x": x, "mask": None}), model(x))


class Level(Enum):
    """Names of feature maps."""

    LOW = "low"
    HIGH = "high"


class Nested(Masked):
    """Takes one dict, whose entries it names itself."""

    def forward(self, maps: dict[Any, Tensor]) -> Tensor:
        return super().forward(maps["x" if "x" in maps else Level.LOW])


def test_entries_of_a_nested_dict_may_stay_and_be_named_by_anything() -> None:
    model, x = Nested(), torch.randn(5, 3)
    layers = gpipe.as_layers(model, ({"x": X},))
    assert torch.equal(layers(({"x": x, "label": X},)), model({"x": x}))
    with pytest.raises(
        ValueError, match=r"^input 0 is a dict of y, but the example was a dict of x; give it like the example$"
    ):
        layers(({"y": x},))
    assert torch.equal(gpipe.as_layers(model, ({Level.LOW: X},))(({Level.LOW: x},)), model({Level.LOW: x}))


class Turns(nn.Module):
    """Multiplies tensors by the first one in a dict, which in an ordered one has been the second."""

    def forward(self, maps: dict[Any, Tensor]) -> dict[Any, Tensor]:
        if isinstance(maps, OrderedDict):
            maps.move_to_end(next(iter(maps)))
        first = next(iter(maps.values()))
        return {key: x * first for key, x in maps.items()}


class Turning(Parts):
    """Does so before and within one operation, with a dict of the same type, and may return one."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.turns, self.returns = Turns(), returns

    def forward(self, maps: dict[Any, Tensor]) -> Any:
        maps = type(maps)(self.turns(maps))
        made = type(maps)((key, self.a(x)) for key, x in maps.items())
        found = {key: self.b(x) for key, x in self.turns(made).items()}
        return found if self.returns else next(iter(found.values()))


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("keys", [(Level.LOW, Level.HIGH), ("low", "high")])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_dicts_may_have_an_order_and_be_named_by_enums_wherever_they_go(
    kind: type[dict[Any, Tensor]], keys: tuple[Any, Any], *, returns: bool
) -> None:
    model, inputs = Turning(returns=returns), kind((key, torch.randn(5, 4)) for key in keys)
    layers, expected = gpipe.as_layers(model, (inputs.copy(),), leaves=["turns"]), model(inputs.copy())
    for one in (layers, pickle.loads(pickle.dumps(layers))):
        found = one((inputs.copy(),))
        pairs = [(found[key], expected[key]) for key in expected] if returns else [(found, expected)]
        assert all(torch.equal(*pair) for pair in pairs) and (not returns or list(found) == list(expected))


class Updating(Parts):
    """Changes the dict or the list that it is given, and one that a submodule of one operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nests = Nests()

    def forward(self, nest: Any) -> Tensor:
        if isinstance(nest, dict):
            nest.update(y=self.a(nest.pop("x")))
            x: Tensor = sum(self.nests(nest["y"]).values())
            return self.b(x) if "x" not in nest else x
        nest.append(self.a(nest[-1]))
        return self.b(sum(nest))


class Nests(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x, "y": x * (2 if self.training else 3)}


def test_code_may_change_the_nest_that_it_is_given() -> None:
    model, x = Updating(), torch.randn(5, 4)
    for make in (lambda: {"x": x}, lambda: [x, x + 1]):
        layers = gpipe.as_layers(model, (make(),))
        for one in (layers, layers.eval()):
            assert torch.equal(one((make(),)), model(make()))


def test_the_number_of_examples_and_the_device_are_those_of_a_tensor_in_any_nest() -> None:
    class Counts(Parts):
        def forward(self, nest: Any) -> Tensor:
            x = nest[0]["x"].to(self.a.weight.device)
            return self.b(self.a(x.view(x.shape[0], -1, 2).flatten(1))) + torch.arange(len(x))[:, None]

    model, x = Counts(), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, ([{"x": x[:2]}],))(([{"x": x}],)), model([{"x": x}]))


def test_another_kind_of_inputs_is_told_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^the model's input is of type object, but the example was a dict of x;"):
        gpipe.as_layers(Masked(), {"x": X})(object())


class Reading(nn.Module):
    """Uses a size of its inputs."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Embedding(9, 4), nn.Linear(4, 3), read

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.read(self.first(tokens)))


def view_by_examples(x: Tensor) -> Tensor:
    shape = x.shape
    assert len(shape) == 3, f"expected three dimensions, not {shape}"
    return x.view(shape[0], -1, 4).flatten(1).view(shape[0], -1, 4)


def unpack(x: Tensor) -> Tensor:
    _, time, _ = x.shape
    return x.sum(1) / time


def fill(x: Tensor) -> Tensor:
    shape = x.shape
    return x.view(shape[0], -1, 4) + torch.zeros(shape)


def count(x: Tensor) -> Tensor:
    shape = x.shape
    return x * (len(shape) + shape.count(8))


@pytest.mark.parametrize(
    "read",
    [
        unpack,
        fill,
        count,
        lambda x: x.sum(1) / x.shape[1],
        lambda x: x.sum(1) / x.size(1),
        lambda x: x.sum(1) / x.size()[-2],
        lambda x: x.sum(1) / len(x[0]),
        lambda x: x.sum(1) / len(x.unbind(1)),
        lambda x: sum(x.unbind(1)),
        lambda x: x + torch.ones(x.shape[1:]),
        lambda x: x + torch.ones(x[0].shape),
        lambda x: x.sum(1) / (x[0].numel() // 4),
        lambda x: x.sum(1) if x.shape[1:] == (8, 4) else x.mean(1),
        lambda x: x.sum(1) if torch.Size((8, 4)) == x[0].shape else x.mean(1),
        lambda x: x.view(x.shape),
        lambda x: x + torch.zeros((1,) + x.shape)[0],  # noqa: RUF005
        lambda x: x * torch.tensor(x.shape[1:]).sum(),
        lambda x: (x.flatten(0, 1) / x.flatten(0, 1).shape[0]).view(x.shape[0], -1, 4),
        lambda x: x.sum(1) / x.numel(),
    ],
)
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_other_sizes_than_the_examples_are_refused_where_code_reads_them(
    read: Callable[[Tensor], Tensor], kind: str
) -> None:
    def nest(tokens: Tensor) -> Any:
        return {"tensor": tokens, "tuple": (tokens,), "dict": {"tokens": tokens}}[kind]

    model = Reading(read)
    layers = gpipe.as_layers(model, nest(torch.zeros(2, 8, dtype=torch.long)))
    tokens = torch.arange(40).reshape(5, 8) % 9
    assert torch.equal(layers(nest(tokens)), model(tokens))
    name = {"tensor": "the model's input", "tuple": "input 0", "dict": "tokens"}[kind]
    for length in (1, 4, 9):
        said = rf"^{name} has the sizes 5, {length}, but the example had any number, 8, and the .*leaves=\['\.\.\.'\]$"
        with pytest.raises(ValueError, match=said):
            layers(nest(torch.zeros(5, length, dtype=torch.long)))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum(1) / x.shape[0],
        lambda x: x.sum(1) / x.size(0),
        lambda x: x.sum(1) / len(x),
        view_by_examples,
        lambda x: x.flatten(2).mean(-x.dim() + 1 + x.ndim - 2, keepdim=True) * x,
        lambda x: torch.cat(x.chunk(2, 2)[::-1], 2),
    ],
)
def test_code_that_reads_no_size_but_the_number_of_examples_takes_any_other(read: Callable[[Tensor], Tensor]) -> None:
    model = Reading(read)
    layers = gpipe.as_layers(model, torch.zeros(2, 8, dtype=torch.long))
    for length in (1, 4, 9):
        tokens = torch.arange(5 * length).reshape(5, length) % 9
        assert torch.equal(layers(tokens), model(tokens))


class Flat(nn.Module):
    """Makes one row of each word, and may keep something of each text beside them."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.first, self.keeps = nn.Embedding(9, 4), keeps
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        kept = self.first(tokens)
        x = kept.flatten(0, 1)
        for layer in self.layers:
            x = layer(x).relu()
        x = x.view(len(tokens), -1, 4)
        return (x * kept if self.keeps else x).mean(1)


def test_sizes_are_fixed_where_only_a_multiple_of_it_tells_the_number_of_examples() -> None:
    tokens = torch.arange(5 * 16).reshape(5, 16) % 9
    for keeps in (False, True):
        model = Flat(keeps=keeps)
        layers = gpipe.as_layers(model, tokens[:2, :8])
        assert len(layers) > 2 and torch.equal(layers(tokens[:, :8]), model(tokens[:, :8]))
        if keeps:
            assert torch.equal(layers(tokens), model(tokens))
            continue
        with pytest.raises(
            ValueError, match=r"has the sizes 5, 16, but the example had any number, 8, and the model's"
        ):
            layers(tokens)


def test_a_transformer_of_torch_takes_texts_of_any_length() -> None:
    torch.manual_seed(0)
    model, x = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), torch.zeros(2, 5, 8)
    layers = gpipe.as_layers(model, (x, x), leaves=[nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
    texts = torch.randn(3, 7, 8), torch.randn(3, 4, 8)
    with torch.no_grad():
        assert torch.equal(layers(texts), model(*texts))


@pytest.mark.parametrize(("part", "said"), [(np.zeros(3), "a value of type ndarray"), (2, "2"), ("a", "'a'")])
def test_an_example_of_something_else_than_tensors_is_refused_whole(part: Any, said: str) -> None:
    message = (
        f"the example has {said}, and layers take only tensors and None; convert arrays with torch.as_tensor, and make "
        "numbers and names part of the model"
    )
    with pytest.raises(TracingError, match=f"^{message}$"):
        gpipe.as_layers(nn.Linear(3, 3), (torch.zeros(2, 3), part))


def test_a_tensor_without_a_dimension_for_the_examples_is_refused_unless_it_is_replicated() -> None:
    class Tempered(Parts):
        def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
            return self.b(self.a(x) / temperature)

    model, inputs = Tempered(), (torch.randn(5, 4), torch.tensor(2.0))
    message = (
        r"the example has a tensor of shape \(\), without a dimension 0 for the examples; mark it with gpipe.replicated"
    )
    with pytest.raises(TracingError, match=f"^{message}"):
        gpipe.as_layers(model, inputs)
    layers = gpipe.as_layers(model, (inputs[0], gpipe.replicated(inputs[1])))
    assert torch.equal(layers(inputs), model(*inputs))


class Attending(nn.Module):
    """Attends under a mask that belongs to no example, along the first dimension; the examples are the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x.reshape(len(mask), x.shape[1], 8)


def test_a_mask_of_no_example_reaches_every_layer_of_every_micro_batch() -> None:
    torch.manual_seed(0)
    model, x, targets = Attending(), torch.randn(5, 6, 8), torch.randn(5, 6, 8)
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    plain = copy.deepcopy(model)
    layers = gpipe.as_layers(model, (gpipe.split_along(x, 1), gpipe.replicated(mask)))
    assert len(layers) > 2
    pipeline = gpipe.Pipeline(layers, F.mse_loss, gpipe.partition_layers([1] * len(layers), 2), 3, output_dimension=1)
    report = pipeline.train_step(((gpipe.split_along(x, 1), gpipe.replicated(mask)), gpipe.split_along(targets, 1)))
    for part, aims in zip(x.split(2, dim=1), targets.split(2, dim=1), strict=True):
        (F.mse_loss(plain(part, mask), aims) / 3).backward()
    assert torch.allclose(torch.as_tensor(report.loss), F.mse_loss(plain(x, mask), targets))
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, twin.grad, atol=1e-7), name


def test_the_example_may_be_on_another_device_than_the_model() -> None:
    layers = gpipe.as_layers(build("ViT").to("meta"), images())
    other = gpipe.as_layers(build("ViT").to("meta"), images().to("meta"))
    assert [str(layer) for layer in layers] == [str(layer) for layer in other] and len(layers) > 1
    assert {parameter.device.type for parameter in layers.parameters()} == {"meta"}


def test_a_part_of_an_example_is_a_tensor_or_none() -> None:
    class Optional(Parts):
        def forward(self, x: Tensor, more: Tensor | None) -> Tensor:
            return self.b(self.a(x) if more is None else more)

    model, x = Optional(), torch.randn(5, 4)
    layers = gpipe.as_layers(model, (x[:2], None))
    assert torch.equal(layers((x, None)), model(x, None))
    with pytest.raises(TracingError, match=r"the example has 3.0, and layers take only tensors and None"):
        gpipe.as_layers(model, (x, 3.0))


class Convolves(nn.Module):
    """Uses the number of channels, or another size, of what a convolution with a large stride gives."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.first, self.last, self.dimension = nn.Conv2d(3, 4, 32, 32), nn.Conv2d(4, 2, 1), dimension

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x / x.shape[self.dimension])


class Encoder(nn.Module):
    """Returns as many steps as the longest text has."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Translates(Parts):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.compute = Encoder(), compute

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.b(self.compute(self.encoder(self.a(x), lengths)))


def test_a_size_that_depends_on_values_must_not_be_read() -> None:
    x, lengths = torch.randn(5, 7, 4), torch.tensor([3, 2, 6, 1, 5])
    model = Translates(lambda x: x.sum(1) / x.shape[0])
    assert torch.equal(gpipe.as_layers(model, (x[:2], lengths[:2]))((x, lengths)), model(x, lengths))
    with pytest.raises(TracingError, match="reads a size of what a submodule returns, which depends on values; name "):
        gpipe.as_layers(Translates(lambda x: x + torch.arange(x.shape[1])[:, None]), (x, lengths))


def test_images_may_have_any_size_where_code_reads_only_their_number_of_channels() -> None:
    model = Convolves(1)
    layers = gpipe.as_layers(model, torch.zeros(2, 3, 32, 32))
    for size in (32, 64, 100):
        images = torch.randn(5, 3, size, size)
        assert torch.equal(layers(images), model(images))
    with pytest.raises(ValueError, match=r"has the sizes 5, 4, 32, 32, but the example had any number, 3, any num"):
        layers(torch.zeros(5, 4, 32, 32))
    with pytest.raises(ValueError, match=r"has the sizes 5, 3, 33, 33, but the example had any number, 3, 32, 32, and"):
        gpipe.as_layers(Convolves(2), torch.zeros(2, 3, 32, 32))(torch.zeros(5, 3, 33, 33))
