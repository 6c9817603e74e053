"""Train AmoebaNets of five sizes and transfer them: accuracy against size, as in the paper's figure 1(a).

    python -m experiments.model_size --record

For each size, seed 0 tries learning rates, which are judged on held-out images: a rate and its two neighbours, then
further ones while the best is at an end of the range. The other seeds are trained at the best rate. Each model is then
fine-tuned on 100 handwritten digits, with a rate chosen in the same way. Each core trains one size at a time. The runs
are in runs/model_size, and the same command continues from there. An hour on two cores.
"""

from pathlib import Path

from experiments.program import StudyProgram
from experiments.tuning import Tuning, train_each
from gpipe.records import Record
from reproductions.table4_imagenet_and_transfer.model_size import TRAINED, model_size, validation_top1

CLAIM = "table4_imagenet_and_transfer"
FOLDER = Path("runs/model_size")
NUM_FILTERS = (8, 12, 16, 24, 40)
SEEDS = (0, 1, 2)
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
FIRST_RATE = 0.003
PHOTOGRAPHS, DIGITS = (Tuning(name, FOLDER, RATES, FIRST_RATE, validation_top1) for name in TRAINED.values())


def train_size(num_filters: int) -> list[Record]:
    """Return the runs of one size: on photographs, then on digits."""
    name, size = f"{num_filters}_filters", f"model.num_filters={num_filters}"
    rate, trained = PHOTOGRAPHS.tune(name, {seed: [size, "init_from=null"] for seed in SEEDS})
    starts = {seed: PHOTOGRAPHS.run_folder(name, rate, seed) for seed in SEEDS}
    return trained + DIGITS.tune(name, {seed: [size, f"init_from={start}"] for seed, start in starts.items()})[1]


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: [model_size]})
    program.parse()
    program.publish({CLAIM: train_each(train_size, NUM_FILTERS[::-1], "sizes")})  # the largest first
