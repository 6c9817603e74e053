"""The model with a cache gives, position by position, what the plain layers give for the whole target."""

import pytest
import torch
from torch import nn

from gpipe.decoding.fairseq_model import FairseqModel
from tests.decoding.tiny_translation import END, VOCABULARY, log_probabilities, sentences, tiny_layers

PADDING = 1
BEAM = 3


def padded(rows: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PADDING] * (longest - len(row))] for row in rows])


@torch.no_grad()
def test_every_step_equals_the_plain_layers_while_hypotheses_change_places_and_sentences_leave() -> None:
    layers, sources = tiny_layers(), sentences(4)
    model = FairseqModel(layers)
    memory = model.encoder.forward_torchscript({"src_tokens": padded([[*source, END] for source in sources])})
    order = torch.arange(4).repeat_interleave(BEAM)
    memory = model.encoder.reorder_encoder_out(memory, order)
    generator = torch.Generator().manual_seed(1)
    tokens, owners, state = torch.full((4 * BEAM, 1), END), order.tolist(), {}
    for step in range(6):
        if step:
            # Any row of its own sentence may follow any; the second sentence leaves at step 3, the fourth at step 5.
            kept = sorted(set(owners) - ({1} if step == 3 else {3} if step == 5 else set()))
            old = [[row for row, owner in enumerate(owners) if owner == sentence] for sentence in kept]
            chosen = torch.randint(BEAM, (len(kept), BEAM), generator=generator)
            order = torch.tensor([rows[index] for rows, picked in zip(old, chosen, strict=True) for index in picked])
            model.decoder.reorder_incremental_state_scripting(state, order)
            memory = model.encoder.reorder_encoder_out(memory, order)
            owners = [owners[row] for row in order]
            new = torch.randint(4, VOCABULARY, (len(order), 1), generator=generator)
            tokens = torch.cat((tokens[order], new), dim=1)
        found = model.get_normalized_probs(model.decoder(tokens, encoder_out=memory, incremental_state=state))
        for row, owner in enumerate(owners):
            expected = log_probabilities(layers, sources[owner], tokens[row, 1:].tolist())[-1]
            torch.testing.assert_close(found[row, 0], expected, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_two_batches_do_not_know_of_each_other() -> None:
    model = FairseqModel(tiny_layers())
    tokens = torch.tensor([[END], [END]])
    encoded = [model.encoder.forward_torchscript({"src_tokens": torch.tensor([[5 + i, END]])}) for i in range(2)]
    memories = [model.encoder.reorder_encoder_out(memory, torch.tensor([0, 0])) for memory in encoded]
    states: list[dict] = [{}, {}]
    first = [model.decoder(tokens, memory, state)[0] for memory, state in zip(memories, states, strict=True)]
    again = [model.decoder(tokens, memory, {})[0] for memory in memories]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(*first)


def test_the_layers_themselves_stay_as_they_were() -> None:
    layers = tiny_layers()
    names, source = (
        [name for name, _ in layers.named_modules()],
        (torch.tensor([[5, 6, END]]), torch.tensor([[END, 7]])),
    )
    before = layers(source)
    model = FairseqModel(layers)
    memory = model.encoder.forward_torchscript({"src_tokens": source[0]})
    memory = model.encoder.reorder_encoder_out(memory, torch.tensor([0]))
    state: dict = {}
    for time in (1, 2):
        model.decoder(source[1][:, :time], memory, state)
    assert [name for name, _ in layers.named_modules()] == names
    assert torch.equal(layers(source), before)
    assert {id(one) for one in model.parameters()} == {id(one) for one in layers.parameters()}


def test_dropout_is_off() -> None:
    layers = tiny_layers().train()
    FairseqModel(layers)
    assert not any(module.training for module in layers.modules() if next(module.children(), None) is None)


def test_another_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^no layer embeds a target, so this is not a translation model: load a checkpoint of one\.$"
    ):
        FairseqModel(nn.Sequential(nn.Linear(2, 2)))


def test_logits_that_are_not_finite_are_refused() -> None:
    model = FairseqModel(tiny_layers())
    for value in (float("nan"), float("inf")):
        logits = torch.zeros(2, 1, VOCABULARY)
        logits[1, 0, 7] = value
        with pytest.raises(ValueError, match="logits are not finite, so it cannot translate: use another checkpoint"):
            model.get_normalized_probs((logits, None))
