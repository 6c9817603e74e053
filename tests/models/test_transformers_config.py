"""An argument that a configuration of transformers would only keep is refused."""

import re

import pytest

from gpipe.models.transformers_models import make_transformers_config


@pytest.mark.parametrize(("name", "argument"), [("gpt2", "n_layr"), ("llama", "n_layer")])
def test_an_unknown_argument_is_refused(name: str, argument: str) -> None:
    sentence = (
        f"model.arguments is {{'{argument}': 2}}, which {name} does not take (it has no {argument}): correct them; "
        "if the experiment sets them, start from one that does not, such as +experiment=language_model."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make_transformers_config(name, {argument: 2}, 100, {})


def test_arguments_are_known_by_each_of_their_names() -> None:
    assert make_transformers_config("gpt2", {"num_hidden_layers": 2}, 100, {"eos_token_id": 3}).n_layer == 2
