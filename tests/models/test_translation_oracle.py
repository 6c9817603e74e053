"""T(L, H, A) beside a plain oracle; what padding and later tokens change, which is nothing."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.translation_case import END, PADDING, SOURCES, TARGETS, batch, make_model, pad, shift


def oracle(weights: dict[str, Tensor], source: list[int], previous: list[int], num_layers: int = 2) -> Tensor:
    """Compute the logits of one sentence, which needs no padding, from the weights by name."""

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.einsum("td,cd->tc", x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return (
            centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
            + (weights[f"{name}.bias"])
        )

    def mix(name: str, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
        queries, keys, values = (x.view(len(x), 3, 8) for x in (queries, keys, values))
        scores = torch.einsum("qhc,khc->hqk", queries, keys) / math.sqrt(8)
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        return linear(f"{name}.output", torch.einsum("hqk,khc->qhc", scores.softmax(2), values).flatten(1))

    def attend(layer: int, x: Tensor, *, causal: bool) -> Tensor:
        parts = linear(f"{layer}.attention.queries_keys_values", norm(f"{layer}.attention_norm", x)).chunk(3, dim=1)
        return x + mix(f"{layer}.attention", *parts, causal=causal)

    def feed(layer: int, x: Tensor) -> Tensor:
        hidden = linear(f"{layer}.widen", norm(f"{layer}.feedforward_norm", x)).clamp(min=0)
        return x + linear(f"{layer}.narrow", hidden)

    def embed(layer: int, tokens: list[int]) -> Tensor:
        rows = [weights[f"{layer}.embedding.weight"][token] * 4 for token in tokens]
        return torch.stack([row + wave(PADDING + 1 + position) for position, row in enumerate(rows)])

    x = embed(0, source)
    for layer in range(1, num_layers + 1):
        x = feed(layer, attend(layer, x, causal=False))
    memory = norm(f"{num_layers + 1}.memory_norm", x)
    x = embed(num_layers + 1, previous)
    for layer in range(num_layers + 2, 2 * num_layers + 2):
        x = attend(layer, x, causal=True)
        queries = linear(f"{layer}.memory_attention.queries", norm(f"{layer}.memory_attention_norm", x))
        keys, values = linear(f"{layer}.memory_attention.keys_values", memory).chunk(2, dim=1)
        x = feed(layer, x + mix(f"{layer}.memory_attention", queries, keys, values, causal=False))
    return norm(f"{2 * num_layers + 2}.norm", x) @ weights[f"{2 * num_layers + 3}.weight"].T


def wave(position: int) -> Tensor:
    """Return the sinusoids of one position, 16 wide."""
    angles = [position / 10_000 ** (i / 7) for i in range(8)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


@pytest.mark.parametrize("tied", ["none", "inputs", "output", "all"])
def test_outputs_and_gradients_are_those_of_a_plain_oracle_without_padding(tied: str) -> None:
    model = make_model(tied=tied).double()
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    copies = {id(parameter): parameter.detach().clone().requires_grad_() for parameter in model.parameters()}
    weights = {name: copies[id(value)] for name, value in model.named_parameters(remove_duplicate=False)}

    found = model(batch())
    expected = [oracle(weights, source, shift(target)) for source, target in zip(SOURCES, TARGETS, strict=True)]
    for row, logits in zip(found, expected, strict=True):
        torch.testing.assert_close(row[: len(logits)], logits, rtol=1e-11, atol=1e-11)

    F.cross_entropy(found.flatten(0, 1), pad(TARGETS).flatten(), ignore_index=PADDING, reduction="sum").backward()
    F.cross_entropy(
        torch.cat(expected), torch.tensor([token for target in TARGETS for token in target]), reduction="sum"
    ).backward()
    assert len(copies) == len(weights) - {"none": 0, "inputs": 1, "output": 1, "all": 2}[tied]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-11, msg=name)


def test_a_sentence_alone_is_the_sentence_in_a_padded_batch() -> None:
    model = make_model().double()
    together = model(batch())
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        alone = model((pad([source]), pad([shift(target)])))
        torch.testing.assert_close(together[row, : len(target)], alone[0], rtol=1e-12, atol=1e-12)


def test_what_stands_at_the_padding_of_the_source_changes_nothing_and_learns_nothing() -> None:
    model = make_model(tied="none")
    before = model(batch())
    with torch.no_grad():
        model[0].embedding.weight[PADDING] = 1e4  # type: ignore[union-attr, index]
    after = model(batch())
    assert torch.equal(before, after)
    after[pad(TARGETS) != PADDING].square().sum().backward()
    for layer in (0, 3):
        gradient = model[layer].embedding.weight.grad  # type: ignore[union-attr]
        assert not gradient[PADDING].any() and gradient[END].any()  # type: ignore[index, union-attr]


def test_a_later_token_of_the_target_changes_no_earlier_output_and_the_source_changes_all() -> None:
    model = make_model(scale_feedforward=False)
    source, previous = pad(SOURCES[:1]), pad([shift(TARGETS[1])])
    changed = previous.clone()
    changed[:, 4] += 1
    before, after = model((source, previous)), model((source, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=2).any()
    source[:, -2] += 1
    assert not torch.isclose(before, model((source, previous))).all(dim=2).any()
