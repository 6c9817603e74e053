"""Count the parameters of the paper's translation models, and of the five laptop models of equal size.

    python -m experiments.translation_parameters

Builds each model on the meta device and counts; a parameter that two layers share counts once. Seconds, no data, no
GPU.
"""

from typing import Any

import torch

from experiments.deep_or_wide import MODELS
from experiments.program import StudyProgram, track
from gpipe.config import compose_plain
from gpipe.models import translation_transformer
from gpipe.records import make_record
from reproductions import ROOT
from reproductions.figure3_multilingual.depth import deep_or_wide_models
from reproductions.figure3_multilingual.tables import figure3_models
from reproductions.pages import read_paper
from reproductions.translation_runs import DEEP_OR_WIDE, PARAMETERS

FOLDER = ROOT / "reproductions" / "figure3_multilingual"
VOCABULARY_SIZE = 64_000
# The number of embedding-sized tables for each way of tying; the models of conf/ tie "inputs".
TABLES_BY_TYING = {"all": 1, "inputs": 2, "none": 3}
OURS = "inputs"
WEIGHT_BYTES = 4


def count(num_layers: int, feedforward_size: int, num_heads: int, model_size: int, head_size: int) -> dict[str, Any]:
    """Return a model's sizes and its numbers of parameters, as in conf/ and by the number of tables."""
    counts = {}
    for tied in TABLES_BY_TYING:
        with torch.device("meta"):
            model = translation_transformer(
                num_layers,
                feedforward_size,
                num_heads,
                vocabulary_size=VOCABULARY_SIZE,
                model_size=model_size,
                head_size=head_size,
                tied=tied,
            )
        counts[tied] = sum(parameter.numel() for parameter in model.parameters())
    return {
        "num_layers": num_layers,
        "feedforward_size": feedforward_size,
        "num_heads": num_heads,
        "model_size": model_size,
        "parameters": counts[OURS],
        "parameters_by_tables": {str(TABLES_BY_TYING[tied]): number for tied, number in counts.items()},
        "parameters_beside_tables": counts[OURS] - TABLES_BY_TYING[OURS] * VOCABULARY_SIZE * model_size,
        "parameter_bytes": WEIGHT_BYTES * counts[OURS],
    }


def count_paper_models() -> list[dict[str, Any]]:
    """Count each model of paper.csv, with 64 channels per head."""
    names = ("num_layers", "feedforward_size", "num_heads")
    return [
        count(*(int(row[name]) for name in names), model_size=1024, head_size=64)
        | {"num_stages": int(row["num_stages"])}
        for row in track(read_paper(FOLDER), "the paper's models")
    ]


def count_laptop_models() -> list[dict[str, Any]]:
    """Count the models of `+experiment=deep_or_wide_laptop`, from wide to deep."""
    names = ("num_layers", "feedforward_size", "num_heads", "model_size", "head_size")
    models = [compose_plain([f"+experiment={DEEP_OR_WIDE}", f"model=translation_{model}"])["model"] for model in MODELS]
    return [count(*(model[name] for name in names)) for model in models]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {FOLDER.name: [figure3_models, deep_or_wide_models]})
    program.parse()
    record = make_record(
        kind="planned",
        experiment=PARAMETERS,
        config={"vocabulary_size": VOCABULARY_SIZE, "tied": OURS},
        seed=0,
        results={"models": count_paper_models(), "laptop": count_laptop_models()},
    )
    program.publish_record(record)
