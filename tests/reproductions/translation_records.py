"""Records of translation as its tests need them: small, and with figures that are easily computed by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe.records import Record, make_record


def trained(
    experiment: str,
    seed: int,
    losses: Mapping[str, float],
    *,
    languages: Sequence[str] | None = None,
    loss: float = 1.0,
    shape: tuple[int, int, int] = (2, 256, 4),
    batch_size: int = 4096,
    **results: Any,
) -> Record:
    """The record of a training: the loss and accuracy of all, and the losses of some languages."""
    num_layers, feedforward_size, num_heads = shape
    config = {
        "name": experiment,
        "model": {
            "num_layers": num_layers,
            "feedforward_size": feedforward_size,
            "num_heads": num_heads,
            "model_size": 64,
            "scale_feedforward": results.pop("scaled", True),
            "logit_limit": results.pop("limit", 20.0),
            "dropout": results.pop("dropout", 0.25),
        },
        "data": {"name": "corpus", "languages": None if languages is None else list(languages)},
        "pipeline": {"num_microbatches": batch_size // 1024},
        "trainer": {"batch_size": batch_size, "num_epochs": 1000, "max_steps": results.pop("max_steps", 400)},
        "optimizer": {"learning_rate": results.pop("rate", 0.5)},
        "seed": seed,
    }
    figures = {"loss": loss, "top1": 0.5, **{f"{language}/loss": value for language, value in losses.items()}}
    found = {"num_steps": 400, "evaluation": {"valid": figures}, "least_loss": {**figures, "step": 300}, **results}
    return make_record(kind="measured", command="c", experiment=experiment, config=config, seed=seed, results=found)


def scored(
    run: Record,
    chrf: Mapping[str, float],
    pairs: Mapping[str, int],
    beam: int = 4,
    sentences: Mapping[str, int] | None = None,
    split: str = "test",
) -> Record:
    """The record of the scores of a training's translations, with half the chrF as BLEU; of 100 sentences each."""
    numbers = sentences or {}
    languages = {
        language: {
            "num_train_pairs": pairs[language],
            "num_sentences": numbers.get(language, 100),
            "chrf": value,
            "bleu": value / 2,
        }
        for language, value in chrf.items()
    }
    results = {"num_beams": beam, "languages": languages, "split": split}
    return make_record(
        kind="measured", command="c", experiment="bleu", config=run.config, seed=run.seed, results=results
    )


def cells(table: str) -> list[list[str]]:
    """The cells of a table below its header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()][2:]
