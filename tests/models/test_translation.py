"""T(L, H, A): parameters, payload, logit limits, initial weights, training through a pipeline, wrong settings."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe.models import softmax_names, translation, translation_transformer
from gpipe.models.translation_layers import TokenSoftmax
from gpipe.pipeline.layers.initialization import materialize
from tests.models.translation_case import PADDING, TARGETS, batch, make_model, pad


@pytest.mark.parametrize(
    ("sizes", "printed"),
    [
        ((6, 8192, 16), 400e6),
        ((24, 8192, 16), 1.3e9),
        ((12, 16384, 32), 1.3e9),
        ((32, 16384, 32), 3e9),
        ((64, 16384, 32), 6e9),
    ],
)
def test_the_docstring_has_the_parameters_of_each_way_of_tying_and_those_that_the_paper_prints(
    sizes: tuple[int, int, int], printed: float
) -> None:
    counts = []
    for tied in ("none", "inputs", "output", "all"):
        with torch.device("meta"):
            model = translation_transformer(*sizes, tied=tied)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        assert len(model) == 2 * sizes[0] + 4
    assert counts[1] == counts[2]
    assert min(abs(count / printed - 1) for count in counts) < 0.05
    row = next(line for line in (translation.__doc__ or "").splitlines() if f"T{sizes}" in line)
    shown = f"{printed / 1e9:g}B" if printed >= 1e9 else f"{printed / 1e6:g}M"
    assert row.split()[3:] == [shown, *(f"{counts[kind]:,}" for kind in (0, 1, 3))]


def test_tokens_and_padding_pass_through_the_layers_unchanged() -> None:
    source, previous = batch()
    states, padding, passed = make_model()[:3]((source, previous))
    assert torch.equal(padding, source == PADDING) and passed is previous and states.shape == (3, 6, 16)
    states, memory, padding = make_model()[:6]((source, previous))
    assert torch.equal(padding, source == PADDING) and memory.shape == (3, 6, 16) and states.shape == (3, 7, 16)


@pytest.mark.parametrize("soft", [False, True])
def test_logits_are_limited_in_training_only(soft: bool) -> None:
    limited = make_model(logit_limit=0.5, soft_limit=soft)
    plain = make_model()(batch())
    assert (plain.abs() > 0.5).any() and (plain.abs() < 0.5).any()
    assert torch.equal(limited.eval()(batch()), plain)
    assert torch.equal(limited.train()(batch()), 0.5 * (plain / 0.5).tanh() if soft else plain.clamp(-0.5, 0.5))


def test_a_logit_beyond_the_hard_limit_has_no_gradient_and_beyond_the_soft_one_little() -> None:
    states = torch.tensor([[0.1], [1.0], [-30.0]], dtype=torch.float64, requires_grad=True)
    for soft, expected in ((False, [1.0, 0.0, 0.0]), (True, [1 - math.tanh(x / 0.5) ** 2 for x in (0.1, 1.0, 30.0)])):
        softmax = TokenSoftmax(1, 2, 0.5, soft_limit=soft).double()
        nn.init.ones_(softmax.weight)
        (gradient,) = torch.autograd.grad(softmax(states)[:, 0].sum(), states)
        torch.testing.assert_close(gradient[:, 0], torch.tensor(expected, dtype=torch.float64))


def test_the_initial_feed_forward_weights_are_divided_by_the_number_of_layers_and_nothing_else_changes() -> None:
    plain, scaled = (make_model(5, scale_feedforward=scale).state_dict() for scale in (False, True))
    for name, value in plain.items():
        if name.endswith(("widen.weight", "narrow.weight")):
            torch.testing.assert_close(scaled[name], value / 5)
            assert value.std() == pytest.approx(value.shape[1] ** -0.5, rel=0.2)
        else:
            assert torch.equal(scaled[name], value), name


@pytest.mark.parametrize("tied", ["none", "inputs", "output", "all"])
def test_described_on_the_meta_device_it_has_its_ties_and_can_be_filled(tied: str) -> None:
    with torch.device("meta"):
        model = make_model(tied=tied, vocabulary_size=2000)
    tables = [model[0].embedding.weight, model[3].embedding.weight, model[7].weight]  # type: ignore[union-attr]
    assert (tables[0] is tables[1]) == (tied in ("inputs", "all"))
    assert (tables[1] is tables[2]) == (tied in ("output", "all"))
    assert (tables[0] is tables[2]) == (tied == "all")
    layers = [materialize(layer, index, 0, torch.device("cpu")) for index, layer in enumerate(model)]
    weights = nn.Sequential(*layers).state_dict()
    for name in ("0.embedding.weight", "3.embedding.weight", "7.weight"):
        assert weights[name].std() == pytest.approx(16**-0.5, rel=0.02)
        assert weights[name].abs().max() > 2.5 * 16**-0.5, "cut off"
    assert weights["1.widen.weight"].std() == pytest.approx(16**-0.5 / 2, rel=0.1)


def test_the_softmax_layer_is_the_one_that_belongs_to_a_vocabulary() -> None:
    assert softmax_names(nn.ModuleDict({str(i): layer for i, layer in enumerate(make_model())})) == {"layers.7.weight"}


def train(partitions: list[int], mode: str, tied: str) -> dict[str, Tensor]:
    """Train for two steps with dropout and micro-batches of unlike numbers of tokens; return gradients and weights."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)

    def weight(targets: Tensor) -> float:
        return int((targets != PADDING).sum())

    model = make_model(dropout=0.3, tied=tied, logit_limit=2.0)
    pipeline = gpipe.Pipeline(model, loss, partitions, 2, rematerialize=mode, seed=5, loss_weight=weight)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipeline.train_step((batch(), pad(TARGETS)))
        optimizer.step()
    weights = dict(pipeline.named_parameters())
    gradients = {f"gradient of {name}": value.grad for name, value in weights.items() if value.grad is not None}
    assert len(gradients) == len(weights)
    return weights | gradients


@pytest.mark.parametrize("partitions", [[3, 5], [1, 2, 3, 2]])
@pytest.mark.parametrize(("mode", "tied"), [("always", "none"), ("never", "inputs"), ("always", "all")])
def test_a_pipeline_trains_it_as_one_stage_does(partitions: list[int], mode: str, tied: str) -> None:
    found, expected = train(partitions, mode, tied), train([8], "never", tied)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_bfloat16_autocast_stays_close_to_float32() -> None:
    model = make_model()
    expected = model(batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch())
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("vocabulary_size", 1),
        ("model_size", 15),
        ("head_size", 0),
        ("dropout", 1.0),
        ("tied", "both"),
        ("logit_limit", 0.0),
        ("logit_limit", math.nan),
        ("soft_limit", True),
        ("padding_index", 30),
        ("padding_index", -1),
    ],
)
def test_a_wrong_setting_is_refused_by_name(option: str, value: object) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{option} is {value!r}, expected .*: .*\.$"):
        make_model(**{option: value})


@pytest.mark.parametrize("position", range(3))
def test_a_wrong_size_is_refused_by_name(position: int) -> None:
    sizes = [2, 24, 3]
    sizes[position] = 0
    name = ("num_layers", "feedforward_size", "num_heads")[position]
    with torch.device("meta"), pytest.raises(ValueError, match=rf"^{name} is 0, expected .*: .*\.$"):
        translation_transformer(*sizes)
