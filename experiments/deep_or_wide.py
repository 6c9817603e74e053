"""Train five translation models of equal size, from wide to deep, and score them: more than the paper's two models.

    python -m experiments.deep_or_wide --record

For each model, seed 0 tries learning rates, which are judged by the lowest loss on the validation set: a rate and its
two neighbours, then further ones while the best is at an end of the range. The other seeds are trained at the best
rate, and all five translate the test set greedily. Each core trains one model at a time. The runs are in
runs/deep_or_wide, and the same command continues from there. About five hours on two cores.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.program import StudyProgram
from experiments.tuning import Tuning, train_each
from gpipe.records import Record, read_records
from reproductions import ROOT
from reproductions.figure3_multilingual.depth import deep_or_wide
from reproductions.translation_runs import DEEP_OR_WIDE, Trained

CLAIM = "figure3_multilingual"
MODELS = ("t1_512_16", "t2_256_8", "t4_128_4", "t8_64_2", "t16_32_1")
SEEDS = (0, 1, 2, 3, 4)


def score(run: Record) -> float:
    """Return the lowest loss of a run, negative: the higher the better."""
    loss = Trained(run, {}).best("loss")
    assert loss is not None, "a run that ended has been evaluated"
    return -loss


TUNING = Tuning(DEEP_OR_WIDE, Path("runs/deep_or_wide"), (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04), 0.005, score)


def train_model(name: str) -> list[Record]:
    """Return the runs of one model, and the scores of those at the best rate."""
    rate, runs = TUNING.tune(name, {seed: [f"model=translation_{name}"] for seed in SEEDS})
    return runs + [score_translations(TUNING.run_folder(name, rate, seed), beam=1) for seed in SEEDS]


def score_translations(run: Path, beam: int, split: str = "test", languages: Sequence[str] = ()) -> Record:
    """Translate and score a split with the weights of a run's lowest loss, unless that has been done."""
    path = ROOT / run / "scores" / f"{split}_beam_{beam}.jsonl"
    if not path.exists():
        words = [*scoring_words(run, beam, split, languages), "--record", str(path)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_records(path)[0]


def scoring_words(run: Path, beam: int, split: str = "test", languages: Sequence[str] = ()) -> list[str]:
    """Return the words of the command that scores a split, without the file of its record."""
    asked = [*([] if split == "test" else ["--split", split]), *(["--languages", *languages] if languages else [])]
    return ["bleu.py", str(run / "checkpoints" / "best"), "--beam", str(beam), *asked]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: [deep_or_wide]})
    program.parse()
    program.publish({CLAIM: train_each(train_model, MODELS[::-1], "models")})  # the deepest first
