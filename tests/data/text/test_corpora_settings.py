"""The settings of the corpora: a file each, and what is wrong in itself is refused."""

import pytest
from hydra import compose
from omegaconf import OmegaConf

from gpipe.config import ConfigError, TranslationDataConfig
from gpipe.data import CORPORA

pytestmark = pytest.mark.usefixtures("composer")


def settings_of(*overrides: str) -> TranslationDataConfig:
    settings = OmegaConf.to_object(compose("train", overrides=list(overrides)).data)
    assert isinstance(settings, TranslationDataConfig)
    return settings


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_has_a_file_of_settings_with_the_papers_temperature(name: str) -> None:
    settings = settings_of(f"data={name}")
    assert settings.name == name
    assert settings.temperature == 1 / 0.7


def test_settings_can_be_overridden() -> None:
    settings = settings_of("data=multilingual_embedded", "data.languages=[de,zu]", "data.max_pairs=50")
    assert (settings.languages, settings.max_pairs) == (["de", "zu"], 50)
    assert settings_of("data=parallel_text", "data.cache=ids").cache == "ids"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.languages=[]", r"data.languages is \[\], expected codes of languages, or null"),
        ("data.vocabulary_size=4", "data.vocabulary_size is 4, expected 5 or more"),
        ("data.temperature=0", "data.temperature is 0.0, expected a number above 0"),
        ("data.max_tokens=1", "data.max_tokens is 1, expected 2 or more"),
        ("data.max_pairs=0", "data.max_pairs is 0, expected 1 or more, or null"),
    ],
)
def test_wrong_values_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings_of("data=multilingual_embedded", override)
