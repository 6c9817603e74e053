"""Train AmoebaNets of five sizes and transfer them: accuracy against size, as the paper's figure 1(a) shows it.

    python -m experiments.model_size --record

For each size, seed 0 tries learning rates, which are judged on images that are kept for it: a rate and its two
neighbours, then further ones as long as the best is at an end. The best rate trains the other seeds. Each model is then
fine-tuned on 100 handwritten digits, with a rate chosen in the same way. Each core trains one size at a time. The runs
are in runs/model_size: the same command goes on from what is there. An hour on two cores.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.program import StudyProgram, track
from gpipe.launch.devices import own_cores
from gpipe.records import RECORD_FILE, Record
from reproductions import ROOT
from reproductions.additions import read_run
from reproductions.table4_imagenet_and_transfer.model_size import TRAINED, model_size, validation_top1

CLAIM = "table4_imagenet_and_transfer"
FOLDER = Path("runs/model_size")
NUM_FILTERS = (8, 12, 16, 24, 40)
SEEDS = (0, 1, 2)
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
FIRST_RATE = 0.003


def train(experiment: str, num_filters: int, rate: float, seed: int, init_from: Path | None) -> Record:
    """Train a model unless that has been done, and return the record of its run."""
    folder = run_folder(experiment, num_filters, rate, seed)
    if not (ROOT / folder / RECORD_FILE).exists():
        sys.stderr.write(f"{folder}\n")  # whole, whatever the other sizes write
        size, start = f"model.num_filters={num_filters}", "null" if init_from is None else str(init_from)
        settings = [size, f"optimizer.learning_rate={rate:g}", f"seed={seed}", f"init_from={start}"]
        command = ["train.py", f"+experiment={experiment}", *settings, "tracking=disabled", f"hydra.run.dir={folder}"]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_run(ROOT / folder)


def run_folder(experiment: str, num_filters: int, rate: float, seed: int) -> Path:
    """Return the folder of a run."""
    return FOLDER / experiment / f"{num_filters}_filters_rate_{rate:g}_seed_{seed}"


def search_rate(try_rate: Callable[[float], Record]) -> tuple[float, list[Record]]:
    """Try learning rates until the best one has been tried between its neighbours; return it and the runs.

    Of equal rates the one that was tried first is the best.
    """
    runs: dict[float, Record] = {}

    def score(rate: float) -> float:
        if rate not in runs:
            runs[rate] = try_rate(rate)
        return validation_top1(runs[rate])

    best, before = FIRST_RATE, None
    while best != before:
        place, before = RATES.index(best), best
        best = max((best, *RATES[max(place - 1, 0) : place], *RATES[place + 1 : place + 2]), key=score)
    return best, list(runs.values())


def tune(experiment: str, num_filters: int, starts: Mapping[int, Path | None]) -> tuple[float, list[Record]]:
    """Train a size with the first seed at several rates, with the others at the best; return that and the runs.

    Args:
        experiment: the experiment.
        num_filters: of the model.
        starts: the run whose weights each seed begins with; None begins with random ones.
    """
    (first, start), *others = starts.items()
    rate, runs = search_rate(lambda rate: train(experiment, num_filters, rate, first, start))
    return rate, runs + [train(experiment, num_filters, rate, seed, start) for seed, start in others]


def train_size(num_filters: int) -> list[Record]:
    """Return the runs of one size: on photographs, then on digits."""
    (photographs, digits), no_starts = TRAINED.values(), dict.fromkeys(SEEDS)
    rate, trained = tune(photographs, num_filters, no_starts)
    starts = {seed: run_folder(photographs, num_filters, rate, seed) for seed in SEEDS}
    return trained + tune(digits, num_filters, starts)[1]


def train_sizes() -> list[Record]:
    """Return the runs of all sizes: as many at a time as there are cores, the largest first."""
    with ThreadPoolExecutor(len(own_cores())) as pool:
        trained = [pool.submit(train_size, num_filters) for num_filters in reversed(NUM_FILTERS)]
        try:
            return [run for one in track(trained, "sizes") for run in one.result()]
        except BaseException:  # an interrupt, too, ends those that run, but the pool would begin the next ones
            pool.shutdown(cancel_futures=True)
            raise


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: [model_size]})
    program.parse()
    program.publish({CLAIM: train_sizes()})
