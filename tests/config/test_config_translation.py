"""The settings of T(L, H, A): the paper's sizes, and what is refused."""

from pathlib import Path

import pytest
import torch
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

from gpipe.config import ConfigError, TiedTables, TranslationModelConfig
from gpipe.models import translation_transformer

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "model").glob("translation_*.yaml"))
pytestmark = pytest.mark.usefixtures("composer")


def model_of(*overrides: str) -> TranslationModelConfig:
    model = OmegaConf.to_object(compose("train", overrides=list(overrides)).model)
    assert isinstance(model, TranslationModelConfig)
    return model


def test_every_size_of_section_5_is_a_choice_and_builds() -> None:
    paper = {(6, 8192, 16), (12, 16384, 32), (24, 8192, 16), (32, 16384, 32), (64, 16384, 32)}
    assert {"translation_t{}_{}_{}".format(*sizes) for sizes in paper} < set(NAMES)
    for name in NAMES:
        model = model_of(f"model={name}")
        sizes = (model.num_layers, model.feedforward_size, model.num_heads)
        if name == "translation_small":
            assert (*sizes, model.model_size, model.head_size) == (2, 512, 4, 128, 32)
        else:
            assert name == "translation_t{}_{}_{}".format(*sizes)
            assert (model.model_size, model.head_size) == ((1024, 64) if sizes[1] >= 8192 else (64, 16))
        assert (model.tied, model.scale_feedforward, model.logit_limit) == (TiedTables.inputs, True, 20.0)
        options = {key: value for key, value in vars(model).items() if key not in ("family", "tied")}
        with torch.device("meta"):
            translation_transformer(**options, tied=model.tied.value, vocabulary_size=10)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model_size=127", "model.model_size is 127, expected an even number"),
        ("logit_limit=0", "model.logit_limit is 0.0, expected a number above 0, or null"),
        ("tied=both", "Invalid value 'both'"),
        ("num_filters=3", "num_filters"),
    ],
)
def test_a_wrong_value_gets_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises((HydraException, ConfigError)) as caught:
        model_of("model=translation_small", f"model.{override}")
    assert sentence in f"{caught.value} {caught.value.__cause__ or ''}"


def test_a_soft_limit_without_a_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"soft_limit is True, expected false where model\.logit_limit is null"):
        model_of("model=translation_small", "model.logit_limit=null", "model.soft_limit=true")
