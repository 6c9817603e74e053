"""Transformer-L: parameters, outputs, causality, initialisation, and training through a pipeline."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.models import softmax_names, transformer_lm
from gpipe.models.transformer_layers import make_sinusoids

SMALL = {"vocabulary_size": 50, "model_size": 16, "feedforward_size": 24, "num_heads": 4}


def make_model(num_layers: int = 3, **options: float) -> nn.Sequential:
    torch.manual_seed(0)
    return transformer_lm(num_layers, **(SMALL | options))  # type: ignore[arg-type]


def tokens(num_examples: int = 4, length: int = 7) -> Tensor:
    return torch.randint(50, (num_examples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("num_layers", "parameters"),
    [(3, 282_178_816), (13, 785_761_536), (103, 5_318_006_016), (415, 21_029_786_880), (1663, 83_876_910_336)],
)
def test_it_has_the_parameters_of_table_1(num_layers: int, parameters: int) -> None:
    """All layers are alike, so those beyond 103 follow from the difference of two smaller models."""
    built = min(num_layers, 103)
    with torch.device("meta"):
        model, smaller = transformer_lm(built), transformer_lm(1)
    large, small = (sum(parameter.numel() for parameter in each.parameters()) for each in (model, smaller))
    assert large + (num_layers - built) * (large - small) // (built - 1) == parameters
    assert len(model) == built + 2


def test_it_equals_a_plain_oracle_with_explicit_attention_and_masks() -> None:
    model = make_model().double()
    found = model(tokens())
    expected = torch.stack([oracle(model.state_dict(), row.tolist()) for row in tokens()])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def oracle(state: dict[str, Tensor], row: list[int], num_layers: int = 3, num_heads: int = 4) -> Tensor:
    """Compute the logits of one sequence, head by head and position by position."""
    width = state["0.weight"].shape[1]
    part = width // num_heads
    x = torch.stack(
        [state["0.weight"][token] * width**0.5 + wave(position, width) for position, token in enumerate(row)]
    )
    for index in range(1, num_layers + 1):
        own = {name.split(".", 1)[1]: value for name, value in state.items() if name.startswith(f"{index}.")}

        def linear(name: str, value: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            return value @ own[f"{name}.weight"].T + own[f"{name}.bias"]

        def norm(name: str, value: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            centred = value - value.mean(1, keepdim=True)
            scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
            return scaled * own[f"{name}.weight"] + own[f"{name}.bias"]

        queries, keys, values = linear("attention.queries_keys_values", norm("attention_norm", x)).chunk(3, dim=1)
        mixed = torch.zeros_like(x)
        for head in range(num_heads):
            own_part = slice(head * part, (head + 1) * part)
            for now in range(len(row)):
                scores = torch.stack([queries[now, own_part] @ keys[t, own_part] for t in range(now + 1)])
                mixed[now, own_part] = (scores / part**0.5).softmax(0) @ values[: now + 1, own_part]
        x = x + linear("attention.output", mixed)
        x = x + linear("narrow", linear("widen", norm("feedforward_norm", x)).clamp(min=0))
    return x @ state[f"{num_layers + 1}.weight"].T + state[f"{num_layers + 1}.bias"]


def wave(position: int, width: int) -> Tensor:
    """Return the sinusoids of one position."""
    half = width // 2
    angles = [position / 10_000 ** (i / (half - 1)) for i in range(half)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def test_a_later_token_changes_no_earlier_output() -> None:
    model = make_model()
    changed = tokens()
    changed[:, 4] = (changed[:, 4] + 1) % 50
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=2).any()


def test_any_length_fits_and_positions_are_told_apart() -> None:
    model = make_model(dropout=0.3)
    assert model(tokens(2, 1)).shape == (2, 1, 50) and model(tokens(1, 300)).shape == (1, 300, 50)
    waves = make_sinusoids(2000, torch.empty(0, 16, dtype=torch.bfloat16))
    assert waves.dtype == torch.bfloat16
    assert torch.equal(waves, make_sinusoids(2000, torch.empty(0, 16)).bfloat16()), "an angle was rounded"


def test_every_parameter_gets_a_gradient_and_can_be_reset_after_to_empty() -> None:
    model = make_model(dropout=0.5)
    model(tokens()).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.device("meta"):
        described = make_model()
    pipeline = gpipe.Pipeline(described, F.cross_entropy, [5], devices="cpu")
    weights = pipeline.layers.state_dict()
    assert weights["0.weight"].std() == pytest.approx(16**-0.5, rel=0.1)
    assert weights["1.widen.weight"].std() == pytest.approx(16**-0.5, rel=0.1)
    assert not weights["4.bias"].any()


@pytest.mark.parametrize("num_layers", [2, 32])
def test_a_model_of_any_depth_begins_near_chance(num_layers: int) -> None:
    model = make_model(num_layers=num_layers, vocabulary_size=256, model_size=64, feedforward_size=256)
    generator = torch.Generator().manual_seed(0)
    given, expected = torch.randint(256, (2, 8, 32), generator=generator)
    loss = F.cross_entropy(model(given).flatten(0, 1), expected.flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=1.5)  # with branches of full size: 7.0 and 20.6


def test_bfloat16_autocast_stays_close_to_float32() -> None:
    model = make_model()
    expected = model(tokens())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


def test_the_softmax_layer_is_the_one_that_belongs_to_a_vocabulary() -> None:
    assert softmax_names(nn.ModuleDict({"4": make_model()[4]})) == {"layers.4.weight", "layers.4.bias"}
    assert softmax_names(nn.ModuleDict({"1": make_model()[1]})) == set()


def train(partitions: list[int], mode: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train for two steps with dropout; return the losses, and the gradients and weights by name."""
    layers = make_model(dropout=0.3)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    weight: Callable[[Tensor], float] = Tensor.numel
    pipeline = gpipe.Pipeline(layers, loss, partitions, 3, rematerialize=mode, seed=5, loss_weight=weight)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(pipeline.train_step((tokens(5, 9)[:, :-1], tokens(5, 9)[:, 1:])).loss)
        optimizer.step()
    weights = dict(pipeline.named_parameters())
    gradients = {f"gradient of {name}": value.grad for name, value in weights.items() if value.grad is not None}
    assert len(gradients) == len(weights)
    return losses, weights | gradients


@pytest.mark.parametrize("partitions", [[5], [2, 3], [1, 1, 2, 1]])
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_a_pipeline_trains_it_as_one_stage_does(partitions: list[int], mode: str) -> None:
    losses, found = train(partitions, mode)
    expected_losses, expected = train([5], "never")
    assert losses == expected_losses
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_layers", 0),
        ("vocabulary_size", 1),
        ("model_size", 18),
        ("feedforward_size", 0),
        ("num_heads", 0),
        ("dropout", 1.0),
    ],
)
def test_a_wrong_setting_is_refused_by_name(option: str, value: float) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{option} is {value}, expected .*: .*\.$"):
        make_model(**{option: value})
