"""Draw a random history: which commands start, one after the other or two at once, and what is done to each."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

BASE = (
    "model=transformer_lm_small", "model.num_layers=2", "model.model_size=8", "model.num_heads=2",
    "model.feedforward_size=8", "data=random_tokens", "data.vocabulary_size=20", "data.sequence_length=6",
    "data.num_train=32", "trainer.batch_size=8", "trainer.evaluation.batch_size=8", "trainer.num_epochs=2",
    "trainer.checkpoints.every_steps=2", "trainer.timeline_every_steps=null", "schedule.name=constant",
    "schedule.warm_up_epochs=0", "pipeline.num_microbatches=2", "launch.num_threads=1", "launch.device=cpu",
    "tracking=disabled",
)  # fmt: skip
MORE = ("trainer.num_epochs=3", "optimizer.learning_rate=0.01")
SETTINGS = {
    "plain": (),
    "another seed": ("seed=1",),
    "more data": ("data.num_train=40",),
    "longer": MORE,
    "trained on": (*MORE, "trainer.resume_from={plain}"),
    "endless": ("trainer.num_epochs=1000000",),
}
PLACES = {
    "its own folder": (),
    "one folder": ("hydra.run.dir=runs/by_hand/one",),
    "a sweep": ("-m", "seed=0,1"),
}
IN_SWEEP = ("plain", "another seed")
LAUNCHED = ("launch=process_per_stage",)
EVERY_LAUNCHED = 50  # of so many histories one has a process per stage, for each of its starts takes seconds
REQUESTS = ("TERM", "INT", "USR1")
PAUSE = ("STOP", "CONT")
# How often each is done to a start; a request stands for any of the three.
FATES = {(): 3, ("request",): 4, ("KILL",): 5, PAUSE: 1, (*PAUSE, "request"): 4, ("full disk",): 4}


@dataclass(frozen=True)
class Command:
    """A command line. settings: a name of SETTINGS; of a sweep, that of its first job. place: a name of PLACES."""

    settings: str
    place: str
    launched: bool = False
    never: bool = False

    @property
    def results(self) -> Sequence[str]:
        """The settings of the runs that it makes."""
        return IN_SWEEP if self.place == "a sweep" else (self.settings,)

    @property
    def folders(self) -> str:
        """Its runs' folders, as a pattern."""
        return {"its own folder": "runs/train/*", "one folder": "runs/by_hand/*", "a sweep": "runs/sweep-*/*"}[
            self.place
        ]

    def arguments(self, plain: Path) -> list[str]:
        """Return the words after train.py; plain: the folder of the run of these settings that can be gone on from."""
        settings = [word.format(plain=plain) for word in SETTINGS[self.settings]]
        more = [*(LAUNCHED if self.launched else ()), *(["trainer.resume=never"] if self.never else ())]
        return [*PLACES[self.place], *BASE, *settings, *more]  # train.py wants the flag of a sweep first

    def __str__(self) -> str:
        """Name it for a person."""
        marks = "".join([", a process per stage" * self.launched, ", resume=never" * self.never])
        return f"{self.settings} in {self.place}{marks}"


@dataclass(frozen=True)
class Step:
    """A start and what is done to it.

    deeds: moments and names of DEEDS; from -1 to 0 the moment is one of its start-up, from 0 to 1 one of its training.
    delay: seconds after the start that it is at once with.
    """

    command: Command
    deeds: tuple[tuple[float, str], ...] = ()
    delay: float = 0.0

    @property
    def done(self) -> set[str]:
        """What is done to it."""
        return {name for _, name in self.deeds}

    @property
    def circumstances(self) -> dict[str, Hashable]:
        """What may matter to how it ends."""
        command = self.command
        return {
            "settings": command.settings,
            "fate": tuple(name for _, name in self.deeds),
            "place": command.place,
            "launched": command.launched,
            "never": command.never,
            "is later": self.delay > 0,
            "training": tuple(moment > 0 for moment, _ in self.deeds),
        }

    def __str__(self) -> str:
        """Name it for a person."""
        deeds = ", ".join(f"{name} at {moment:.2f}" for moment, name in self.deeds)
        return f"{self.command}" + (f", {self.delay:.2f} s later" if self.delay else "") + (f": {deeds}" * bool(deeds))


def draw_history(seed: int) -> list[list[Step]]:
    """Return what happens in the history of a seed: starts one after the other, some of them two at once."""
    chance = random.Random(seed)
    launched = seed % EVERY_LAUNCHED == 0
    place = "its own folder" if launched else _choose(chance, dict(zip(PLACES, (6, 3, 1), strict=True)))
    settings = chance.choice(list(SETTINGS)[:-1])
    events = [_draw_event(chance, settings, place) for _ in range(chance.choice([1, 2, 2]))]
    if launched:
        return [[Step(Command("plain", place, launched=True), _draw_deeds(chance, ("request",)))]]
    return events


def choose_seeds(num_random: int, num_drawn: int) -> list[int]:
    """Return seeds of histories with each pair of circumstances that random histories have, and with as many kills.

    Args:
        num_random: the number of the random histories, those of the first seeds.
        num_drawn: the number of seeds to choose from. Next comes the one that adds most pairs per start; when no pair
            is missing, those whose starts are all killed.
    """
    pairs = {seed: _list_pairs(draw_history(seed)) for seed in range(num_drawn)}
    num_starts = {seed: sum(map(len, draw_history(seed))) for seed in pairs}
    missing = set[Hashable]().union(*(pairs[seed] for seed in range(num_random)))
    chosen = []
    while missing:
        chosen.append(max(pairs, key=lambda seed: len(pairs[seed] & missing) / num_starts[seed]))
        missing -= pairs[chosen[-1]]
    num_kills = {seed: sum("KILL" in step.done for event in draw_history(seed) for step in event) for seed in pairs}
    num_missing = sum(num_kills[seed] for seed in range(num_random)) - sum(num_kills[seed] for seed in chosen)
    for seed in sorted(pairs.keys() - set(chosen)):
        if num_missing > 0 and num_kills[seed] == num_starts[seed]:
            chosen.append(seed)
            num_missing -= num_kills[seed]
    return sorted(chosen, key=lambda seed: (num_kills[seed], num_starts[seed]))  # any third has its share


def _list_pairs(events: Sequence[Sequence[Step]]) -> set[Hashable]:
    """Return each pair of circumstances of a start, of two starts at once, and of two that follow each other."""
    found = {pair for event in events for step in event for pair in combinations(step.circumstances.items(), 2)}
    at_once = [("at once", *event, ("settings", "fate", "place")) for event in events if len(event) > 1]
    then = [("then", *steps, ("settings", "fate")) for both in pairwise(events) for steps in product(*both)]
    for how, first, second, names in (*at_once, *then):
        both = first.circumstances, second.circumstances
        found |= {(how, (one, both[0][one]), (other, both[1][other])) for one, other in product(names, repeat=2)}
    return found


def _draw_event(chance: random.Random, settings: str, place: str) -> list[Step]:
    twice = chance.random() < 0.25
    steps = [_draw_step(chance, settings, place) for _ in range(1 + twice)]
    if twice:
        steps[1] = replace(steps[1], delay=chance.choice([0.0, chance.uniform(0, 0.2)]))
    return steps


def _draw_step(chance: random.Random, settings: str, place: str) -> Step:
    if chance.random() < 0.3 and place != "a sweep":
        settings = chance.choice(list(SETTINGS))
    fate = _choose(chance, FATES)
    if settings == "endless" and not {"request", "KILL", "full disk"} & set(fate):
        fate = (*PAUSE, "request")
    if place == "a sweep":
        settings = IN_SWEEP[0]
    return Step(
        Command(settings, place, never=chance.random() < 0.05 and place != "a sweep"), _draw_deeds(chance, fate)
    )


def _draw_deeds(chance: random.Random, fate: Sequence[str]) -> tuple[tuple[float, str], ...]:
    names = [chance.choice(REQUESTS) if name == "request" else name for name in fate]
    moments = sorted(chance.uniform(-0.5, 1) for _ in names)
    return tuple(zip(moments, names, strict=True))


def _choose(chance: random.Random, weights: dict[Any, int]) -> Any:
    return chance.choices(list(weights), list(weights.values()))[0]
