"""transformers' language models by type, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

_NUM_COMPARED_TOKENS = 8


class Logits(nn.Module):
    """Predicts next tokens with a transformers model: int64 [n, time] -> logits [n, time, vocabulary]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def check_transformers_type(name: str) -> None:
    """Raise ValueError if transformers is not installed, or does not have this type of language model."""
    if find_spec("transformers") is None:
        raise ValueError(
            "model.family is transformers, but that package is not installed: run pip install transformers, or choose "
            "model=transformer_lm."
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"model.name is {name}, expected a type of language model that transformers has: set gpt2, llama, qwen2 or "
            "mistral, for example."
        )


def make_transformers_config(
    name: str, arguments: Mapping[str, Any], vocabulary_size: int, special: Mapping[str, int]
) -> Any:
    """Return transformers' configuration of a language model.

    Args:
        name: its type, such as gpt2.
        arguments: values of the configuration, such as {n_layer: 12}.
        vocabulary_size: the tokenizer's.
        special: token ids by their names in the configuration, such as eos_token_id.

    Raises:
        ValueError: transformers refuses the values, or does not know an argument.
    """
    import transformers

    try:
        known = transformers.AutoConfig.for_model(name)
        if unknown := sorted(argument for argument in arguments if not hasattr(known, argument)):
            raise TypeError(f"it has no {', '.join(unknown)}")
        return transformers.AutoConfig.for_model(
            name, **arguments, vocab_size=vocabulary_size, use_cache=False, **special
        )
    except Exception as error:  # configurations may raise anything
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise ValueError(
            f"model.arguments is {dict(arguments)}, which {name} does not take ({reason}): correct them; if the "
            "experiment sets them, start from one that does not, such as +experiment=language_model."
        ) from error


def make_transformers_model(config: Any, sequence_length: int, seed: int) -> Logits:
    """Make a model on the CPU, with the same initial weights in every process; the global generator stays as it was.

    Raises:
        ValueError: transformers refuses it, it has fewer positions than sequences have tokens, or it sees the tokens
            that it should predict; the last cannot be checked on the meta device, which has no logits to compare.
    """
    import transformers

    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 <= positions < sequence_length:  # xlnet's -1 is no limit
        raise ValueError(
            f"data.sequence_length is {sequence_length}, but {config.model_type} has {positions} positions: lower it, "
            "or raise max_position_embeddings (n_positions for gpt2) in model.arguments."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = Logits(transformers.AutoModelForCausalLM.from_config(config))
        except Exception as error:  # architectures may raise anything
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise ValueError(
                f"model.arguments do not make a valid {config.model_type} ({reason}): correct them."
            ) from error
        num_tokens = min(sequence_length, _NUM_COMPARED_TOKENS)
        if num_tokens > 1 and _sees_later_tokens(model, num_tokens, config.get_text_config().vocab_size):
            decoder = getattr(config, "is_decoder", None) is False
            remedy = "set +model.arguments.is_decoder=true, or choose" if decoder else "choose"
            raise ValueError(
                f"model.name is {config.model_type}, which sees later tokens, expected a model that predicts each "
                f"token from earlier ones only: {remedy} another type, such as gpt2."
            )
    return model


def _sees_later_tokens(model: Logits, num_tokens: int, vocabulary_size: int) -> bool:
    """Return whether the last token changes earlier logits; False if the model cannot be run."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return False
    tokens = torch.randint(vocabulary_size, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocabulary_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits, changed = (model(sequence)[:, :-1] for sequence in (tokens, other))
    except Exception:  # noqa: BLE001 - tracing will refuse the model with the reason
        return False
    finally:
        model.train(was_training)
    # Mixtures of experts group tokens differently, so sums round differently.
    tolerance = 100 * torch.finfo(logits.dtype).eps * logits.abs().max()
    return bool((logits - changed).abs().max() > tolerance)


def config_text(config: Any) -> str:
    """Return a configuration as the text of a config.json that `from_pretrained` reads."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return json.dumps(config.to_dict() | {"architectures": architectures}, indent=2, sort_keys=True) + "\n"
