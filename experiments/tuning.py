"""Train the models of a study, each once and one per core, at the learning rate that the first seed found best."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from experiments.program import track
from gpipe.launch.devices import own_cores
from gpipe.records import RECORD_FILE, Record
from reproductions import ROOT
from reproductions.additions import read_run

Item = TypeVar("Item")


@dataclass(frozen=True)
class Tuning:
    """The trainings of an experiment, and the search for their learning rate.

    Attributes:
        experiment: what is trained.
        folder: of the runs, in the repository. A run that is there is not repeated.
        rates: the learning rates that may be tried, the lowest first.
        first_rate: the one that is tried first.
        score: what a run is judged by, the higher the better.
    """

    experiment: str
    folder: Path
    rates: Sequence[float]
    first_rate: float
    score: Callable[[Record], float]

    def run_folder(self, name: str, rate: float, seed: int) -> Path:
        """Return the folder of a run; name: that of the model."""
        return self.folder / self.experiment / f"{name}_rate_{rate:g}_seed_{seed}"

    def train(self, name: str, settings: Sequence[str], rate: float, seed: int) -> Record:
        """Train a model unless that has been done, and return the record of its run."""
        folder = self.run_folder(name, rate, seed)
        if not (ROOT / folder / RECORD_FILE).exists():
            sys.stderr.write(f"{folder}\n")  # whole, whatever other threads write
            command = [sys.executable, *self.words(settings, rate, seed), f"hydra.run.dir={folder}"]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return read_run(ROOT / folder)

    def words(self, settings: Sequence[str], rate: float, seed: int) -> list[str]:
        """Return the words of the command that trains a model, without the folder of its run."""
        words = [*settings, f"optimizer.learning_rate={rate:g}", f"seed={seed}", "tracking=disabled"]
        return ["train.py", f"+experiment={self.experiment}", *words]

    def tune(self, name: str, settings: Mapping[int, Sequence[str]]) -> tuple[float, list[Record]]:
        """Train a model with the first seed at several rates, with the others at the best; return that and the runs.

        Args:
            name: of the model.
            settings: of its trainings, by seed.
        """
        (first, words), *others = settings.items()
        runs: dict[float, Record] = {}

        def try_rate(rate: float) -> float:
            runs[rate] = self.train(name, words, rate, first)
            return self.score(runs[rate])

        rate = climb(self.rates, self.first_rate, try_rate)
        return rate, [*runs.values(), *(self.train(name, words, rate, seed) for seed, words in others)]


def climb(values: Sequence[float], first: float, score: Callable[[float], float]) -> float:
    """Try values until the one of the highest score has been tried between its neighbours, and return it.

    Each is tried once at most. Of equal values the one that was tried first is the best.
    """
    score, best, before = cache(score), first, None
    while best != before:
        place, before = values.index(best), best
        best = max((best, *values[max(place - 1, 0) : place], *values[place + 1 : place + 2]), key=score)
    return best


def train_each(train: Callable[[Item], list[Record]], items: Sequence[Item], what: str) -> list[Record]:
    """Return the runs of all items: as many items at a time as there are cores, the first ones first."""
    with ThreadPoolExecutor(len(own_cores())) as pool:
        trained = [pool.submit(train, item) for item in items]
        try:
            return [run for one in track(trained, what) for run in one.result()]
        except BaseException:  # an interrupt, too, ends those that run, but the pool would begin the next ones
            pool.shutdown(cancel_futures=True)
            raise
