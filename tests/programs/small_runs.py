"""Settings of a run that is small, in one process."""

from hydra import compose

from gpipe.config import RunConfig, to_run
from gpipe.launch.processes import Place

ALONE = Place(None, "cpu")
SMALL = ("model.num_filters=8", "data.image_size=32", "trainer.batch_size=16", "tracking=disabled")


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=[*SMALL, *overrides]))


TOKENS = ("data=random_tokens", "data.vocabulary_size=40", "data.sequence_length=5")
LANGUAGE_MODEL = ("model=transformer_lm_small", "model.num_layers=2", *TOKENS, "trainer.batch_size=8")
TRANSLATION = ("+experiment=transformer_multilingual_laptop", "trainer.batch_size=8")
