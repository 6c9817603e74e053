"""Play random histories of runs, and check what must hold of them.

    histories.py FOLDER SEED...

Plays the histories of the seeds in FOLDER: train.py is started, paused, asked to stop,
killed, left without a disk, started twice at once, and started with other settings in between; at the end each command
is started until nothing of it is unfinished. Prints each history that went wrong, with its seed and its steps, and last
a count of how the starts ended, as JSON; exits with status 1 where a history went wrong.
"""

import json
import math
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.reliability.drawn_history import REQUESTS, SETTINGS, Command, Step, draw_history
from tests.reliability.session import assert_same, log_of, run_folder, saved_steps
from tests.reliability.starts import LONG_SECONDS, Start, fill_disk, signal_of
from tests.support import program_server

DEAF_SECONDS = 6.0
ORPHAN_SECONDS = 10.0
STOPPED = 75
TIMED = "trained on"  # the settings whose undisturbed runs are timed
_DIFFERING = ("seed", "data.num_train", "trainer.num_epochs", "optimizer.learning_rate", "trainer.resume_from")
_REASONS = ("finished", "trainer.resume", *_DIFFERING)
_OUTCOMES = ("num_steps", "num_epochs", "top1", "top5", "best_top1", "evaluation", "least_loss", "parameters")

DEEDS: dict[str, Callable[[int], None]] = {
    "STOP": signal_of(signal.SIGSTOP),
    "CONT": signal_of(signal.SIGCONT),
    "TERM": signal_of(signal.SIGTERM),
    "INT": signal_of(signal.SIGINT),
    "USR1": signal_of(signal.SIGUSR1),
    "KILL": signal_of(signal.SIGKILL),
    "full disk": fill_disk,
}


@dataclass(frozen=True)
class Owner:
    """The run that has a folder. settings: a name of SETTINGS. is_finished: whether it came to its end."""

    settings: str
    is_finished: bool


@dataclass(frozen=True)
class Run:
    """What is in the folder of a run, whether it came to its end or not."""

    folder: Path

    @property
    def record(self) -> dict[str, Any] | None:
        """Its record."""
        path = self.folder / "record.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    @property
    def steps(self) -> list[int]:
        """The steps of its checkpoints."""
        return saved_steps(self.folder)

    @property
    def is_unfinished(self) -> bool:
        """Whether something was saved and it has no record."""
        return self.record is None and bool(self.steps)

    @property
    def config(self) -> dict[str, Any] | None:
        """The settings that it was started with; None where it has none."""
        path = self.folder / "config.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None

    @property
    def trained(self) -> dict[str, Any] | None:
        """Return the settings that it was trained with, by its newest checkpoint; None where it has none."""
        if not self.steps:
            return None
        manifest = self.folder / "checkpoints" / f"step-{self.steps[-1]:08d}" / "manifest.json"
        config: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))["config"]
        return config


@dataclass
class World:
    """What is known before the histories: undisturbed runs, by the names of their settings, and how long they take.

    start_up, whole: seconds until a run has its folder, and until its end, the least of several: what shall happen in a
        run would come after its end where something else had slowed down the one that was timed.
    """

    folder: Path
    start_up: float = math.inf
    whole: float = math.inf
    references: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let the undisturbed runs run, the first of them twice: it loads what no other has to."""
        for name in ["plain", *SETTINGS, *[TIMED] * 2]:
            if name != "endless":
                shutil.rmtree(self.folder / name, ignore_errors=True)
                self.references[name] = self._train(name)

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of the settings, by what tells them apart."""
        return {_mark(_record_of(run)["config"]): name for name, run in self.references.items()}

    def name_of(self, config: dict[str, Any]) -> str:
        """Return the name of the settings."""
        return self.names.get(_mark(config), "endless")

    def arguments(self, command: Command) -> list[str]:
        """Return a command's words after train.py."""
        plain = self.references.get("plain")
        return command.arguments(plain / "checkpoints" / "latest" if plain else Path())

    def seconds(self, moment: float, launched: bool) -> float:
        """Return when a moment is, in seconds after the program listens to signals."""
        start_up, whole = (4.0, 5.0) if launched else (self.start_up, self.whole)
        return start_up + moment * (start_up if moment < 0 else whole - start_up)

    def _train(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        start = Start(folder, self.arguments(Command(name, "its own folder")), (), LONG_SECONDS)
        begun = None
        while start.status is None:
            start.look()
            if begun is None and any(folder.glob("runs/*/*/config.yaml")):
                begun = time.monotonic()
            time.sleep(0.002)
        assert start.status == 0, start.said
        assert start.listened is not None and begun is not None
        if name == TIMED:
            self.start_up = min(self.start_up, begun - start.listened)
            self.whole = min(self.whole, time.monotonic() - start.listened)
        return run_folder(folder)


class History:
    """One history, in a folder of its own; what must hold is asserted on the way and at the end.

    counts: how the starts ended, of all histories.
    """

    def __init__(self, world: World, folder: Path, seed: int, counts: Counter[str]) -> None:
        self.lines: list[str] = []
        self._world, self._folder, self._seed, self._counts = world, folder, seed, counts
        self._done: Counter[str] = Counter()  # starts that ended with 0, by settings, each in a folder of its own
        self._cut: Counter[str] = Counter()  # those that ended otherwise
        self._recorded: dict[Path, str] = {}
        folder.mkdir(parents=True)

    def play(self) -> None:
        """Let it happen; raises AssertionError where something does not hold that must."""
        events = draw_history(self._seed)
        for steps in events:
            self._let(steps)
        for command in dict.fromkeys(replace(step.command, never=False) for steps in events for step in steps):
            if command.settings != "endless":
                self._finish(command)
        for run in self._runs("runs/*/*"):
            self._check_run(run)
        self._check_numbers()

    def _let(self, steps: Sequence[Step]) -> None:
        owners = [self._owner(step.command) for step in steps]
        starts: list[Start] = []
        self.lines.append(" | and at once: ".join(map(str, steps)))
        try:
            for start, step in self._begin(steps):
                starts.append(start)
                if step.delay:
                    self._watch(starts, step.delay)
            self._watch(starts)
        finally:
            for start in starts:
                if start.status is None:
                    start.kill()
        self.lines[-1] += f" -> {', '.join(str(start.status) for start in starts)}"
        for step, start, owner in zip(steps, starts, owners, strict=True):
            self._check_end(step, start, owner, [other for other in starts if other is not start])
        for run in self._runs("runs/*/*"):
            self._check_record(run)

    def _begin(self, steps: Sequence[Step]) -> Iterator[tuple[Start, Step]]:
        for step in steps:
            deeds = [(self._world.seconds(moment, step.command.launched), DEEDS[name]) for moment, name in step.deeds]
            is_endless = step.command.settings == "endless"
            limit = deeds[-1][0] + DEAF_SECONDS if is_endless else LONG_SECONDS
            yield Start(self._folder, self._world.arguments(step.command), deeds, limit), step

    def _watch(self, starts: Sequence[Start], seconds: float = LONG_SECONDS * 2) -> None:
        """Look after the starts until all have ended, or for some time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(start.status is None for start in starts):
            for start in starts:
                if start.status is None:
                    start.look()
            time.sleep(0.002)

    def _finish(self, command: Command) -> None:
        """Start a command again until nothing is unfinished that it would go on with."""
        if command.place != "one folder" and not self._unfinished(command):
            return
        for _ in range(4):
            before = self._unfinished(command)
            owner = self._owner(command)
            self._let([Step(command)])
            if owner is not None and (owner.is_finished or owner.settings != command.settings):
                return  # it was refused, as `_check_end` has seen
            now_done = [run for run in before if run.record is not None]
            assert now_done or not before, f"the same command began anew, beside {before[0].folder.name}"
            if not self._unfinished(command):
                return
        raise AssertionError(f"unfinished for ever: {self._unfinished(command)}")

    def _check_end(self, step: Step, start: Start, owner: Owner | None, beside: Sequence[Start]) -> None:
        """Check how a start ended; owner: of its folder before, where that is one that was given by hand."""
        command, status = step.command, start.status
        assert not (left := start.left(ORPHAN_SECONDS)), f"processes are left: {left}"
        self._counts[str(status)] += 1
        if command.place == "its own folder":
            (self._done if status == 0 else self._cut)[command.settings] += 1
        assert "Traceback" not in start.said, f"a traceback is no message:\n{start.said}"
        assert status in self._expected(step, owner, beside), f"it ended with {status}:\n{start.said}"
        assert status != 1 or "error: " in start.said, f"status 1 without a word:\n{start.said}"
        if command.never and status == 0 and command.settings != "trained on":
            assert "resuming after step" not in start.said, f"trainer.resume=never went on:\n{start.said}"
        if status == 1 and owner is not None and not (step.deeds or beside):
            reasons = _DIFFERING if owner.settings != command.settings and not owner.is_finished else _REASONS
            assert any(name in start.said for name in reasons), f"no reason is given:\n{start.said}"

    def _expected(self, step: Step, owner: Owner | None, beside: Sequence[Start]) -> set[int]:
        """Return the statuses with which a start may end."""
        command = step.command
        found = set[int]()
        if owner is not None and (command.never or owner.is_finished or owner.settings != command.settings):
            found.add(1)
        elif command.settings != "endless":
            found.add(0)
        if (beside and command.place != "its own folder") or "full disk" in step.done:
            found.add(1)
        if set(REQUESTS) & step.done:
            found.add(STOPPED)
        if "KILL" in step.done:
            found.add(-signal.SIGKILL)
        return found

    def _check_record(self, run: Run) -> None:
        """A folder keeps the run that it has, and a record tells what was trained."""
        if run.record is None:
            assert run.folder not in self._recorded, f"the record of {run.folder.name} is gone"
            return
        name = self._world.name_of(run.record["config"])
        before = self._recorded.setdefault(run.folder, name)
        assert name == before, f"{run.folder.name} was a run of {before} and has a record of {name} now"

    def _check_run(self, run: Run) -> None:
        """Compare a run with the undisturbed one of its settings."""
        if run.record is None:
            config = run.trained
            name = None if config is None else self._world.name_of(config)
            assert name in (None, "endless"), f"{run.folder} has checkpoints of {name} and no record"
            if name == "endless":
                self._check_beginning(run)
            return
        name = self._recorded[run.folder]
        whole = self._world.references[name]
        expected = _record_of(whole)
        self._counts["compared"] += 1
        assert run.trained is not None and self._world.name_of(run.trained) == name, (
            f"{run.folder.name} has a record of {name} and checkpoints of {self._world.name_of(run.trained or {})}"
        )
        for key in _OUTCOMES:
            assert run.record["results"][key] == expected["results"][key], f"{key} of {run.folder}, {name}"
        try:
            assert_same(run.folder, whole)
        except AssertionError as difference:
            raise AssertionError(f"{run.folder}, {name}, is not as the undisturbed one: {difference}") from None

    def _check_beginning(self, run: Run) -> None:
        """The run without an end did what another of its settings did, as long as that went."""
        lines, expected = log_of(run.folder), log_of(self._world.references["plain"])
        num_lines = min(len(lines), len(expected))
        assert lines[:num_lines] == expected[:num_lines], f"{run.folder} is not as the undisturbed one"

    def _check_numbers(self) -> None:
        """Each start that ended well has a run of its own; one that was cut short may have left its record."""
        runs = [run for run in self._runs("runs/train/*") if run.record is not None]
        found = Counter(self._recorded[run.folder] for run in runs)
        for name in found | self._done:
            least, most = self._done[name], self._done[name] + self._cut[name]
            assert least <= found[name] <= most, f"{least} starts of {name} ended well, with {found[name]} records"

    def _runs(self, pattern: str) -> list[Run]:
        return [Run(path) for path in sorted(self._folder.glob(pattern)) if path.name != "set_aside"]

    def _unfinished(self, command: Command) -> list[Run]:
        runs = [run for run in self._runs(command.folders) if run.is_unfinished]
        return [run for run in runs if self._world.name_of(run.trained or {}) in command.results]

    def _owner(self, command: Command) -> Owner | None:
        """Return whose a command's folder is, if the folder is given by hand and has a run."""
        if command.place != "one folder":
            return None
        for run in self._runs(command.folders):
            if (config := (run.record or {}).get("config") or run.trained or run.config) is not None:
                return Owner(self._world.name_of(config), run.record is not None)
        return None


def _record_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "record.json").read_text(encoding="utf-8"))
    return record


def _mark(config: dict[str, Any]) -> str:
    """Return what tells settings apart."""
    values = [config.get(section, {}).get(key) for section, key in (name.split(".") for name in _DIFFERING[1:])]
    return json.dumps([config.get("seed"), *values[:-1], bool(values[-1])])


def main(folder: Path, seeds: Sequence[int]) -> int:
    """Play the histories of the seeds; return how many went wrong."""
    program_server.load()
    begun = time.monotonic()
    world, counts, num_failures = World(folder / "undisturbed"), Counter[str](), 0
    for seed in seeds:
        history = History(world, folder / f"history-{seed}", seed, counts)
        try:
            history.play()
        except Exception as wrong:  # noqa: BLE001 - a file that cannot be read is as wrong as one that says something else
            num_failures += 1
            print(f"\nhistory {seed}:", *history.lines, f"{type(wrong).__name__}: {wrong}", sep="\n  ", flush=True)
        else:
            shutil.rmtree(folder / f"history-{seed}")
    print(json.dumps({"failures": num_failures, "seconds": time.monotonic() - begun, **counts}))
    return num_failures


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]]) else 0)
