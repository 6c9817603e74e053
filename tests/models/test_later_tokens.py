"""A language model that sees the token that it should predict is refused."""

import re

import pytest
import torch

from gpipe.models.transformers_models import make_transformers_config, make_transformers_model

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SEES = "sees later tokens, expected a model that predicts each token from earlier ones only: "
DECODER = "set +model.arguments.is_decoder=true, or "


def make(name: str, **arguments: object) -> torch.nn.Module:
    config = make_transformers_config(name, arguments, 50, {"pad_token_id": 0})
    return make_transformers_model(config, 12, seed=1)


@pytest.mark.parametrize("name", ["bert", "roberta", "electra"])
def test_a_type_that_sees_later_tokens_is_refused(name: str) -> None:
    sentence = f"model.name is {name}, which {SEES}{DECODER}choose another type, such as gpt2."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make(name, **TINY)


@pytest.mark.parametrize("name", ["bert", "roberta", "electra"])
def test_a_decoder_of_that_type_sees_none(name: str) -> None:
    model = make(name, is_decoder=True, **TINY).eval()
    tokens = torch.arange(12)[None]
    other = torch.cat([tokens[:, :-1], torch.tensor([[40]])], dim=1)
    assert torch.equal(model(tokens)[:, :-1], model(other)[:, :-1])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
        ("llama", TINY | {"num_key_value_heads": 1}),
        ("mixtral", TINY | {"num_key_value_heads": 1, "num_local_experts": 4}),
    ],
)
def test_other_types_are_made_in_the_mode_and_with_the_generator_as_they_were(
    name: str, arguments: dict[str, object]
) -> None:
    state = torch.get_rng_state()
    assert make(name, **arguments).training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_is_only_described_has_no_logits_to_compare() -> None:
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in make("bert", **TINY).parameters())


def test_a_negative_number_of_positions_is_no_limit() -> None:
    """Xlnet says -1, and is refused for what it sees."""
    with pytest.raises(ValueError, match=f"^model.name is xlnet, which {SEES}choose another type"):
        make("xlnet", d_model=16, n_layer=1, n_head=2, d_inner=32)
