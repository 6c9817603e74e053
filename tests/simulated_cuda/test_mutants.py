"""The simulation notices each wait, event, generator and move to a device that is taken out of the device path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.simulated_cuda.beside_steps import compute
from tests.simulated_cuda.faults import name_exchange, name_link, name_place
from tests.simulated_cuda.machine import Answer, Machine
from tests.simulated_cuda.mutants import SOURCES, Mutant, find_mutants
from tests.simulated_cuda.saves import save
from tests.simulated_cuda.steps import Setting, train

MODULES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    for folder in ("pipeline", "checkpoint", "training")
    for path in (SOURCES / "gpipe" / folder).rglob("*.py")
    if path.stem != "__init__"
)
MUTANTS = [mutant for module in MODULES for mutant in find_mutants(module)]
WATCHED = frozenset(mutant.module for mutant in MUTANTS)
SECONDS = 20.0  # after which a call counts as hanging, which is noticed


class Scenario(NamedTuple):
    """Something that runs on GPUs.

    Attributes:
        hangs: whether a fault is part of it: such a scenario hardly computes.
    """

    num_processes: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    hangs: bool = False


SCENARIOS = (
    Scenario(1, save),
    Scenario(1, train, (Setting(2, "always", tied=True),)),
    Scenario(2, train, (Setting(2, "always", tied=True),)),
    Scenario(1, train, (Setting(2, "always", first_on_cpu=True),)),
    Scenario(2, train, (Setting(1, "always", synchronize_batch_norm=True),)),
    Scenario(2, train, (Setting(1, "always", idle_norm=True),)),
    Scenario(2, train, (Setting(1, shards_optimizer=True),)),
    Scenario(1, train, (Setting(2, "always", checks_recomputation=True, cuda_graphs=True),)),
    Scenario(1, train, (Setting(2, "always", device_threads=True),)),
    Scenario(1, compute, ("cuda",)),
    Scenario(1, name_place, hangs=True),
    Scenario(2, name_link, hangs=True),
    Scenario(2, name_exchange, hangs=True),
)

# What can be taken out without effect, and why.
EQUIVALENT = {
    "pipeline.shared.averaging, _Bucket.__init__: on the CPU: torch.empty_like(parameter, device='meta')": (
        "nothing but its strides is looked at"
    ),
    "training.ema, _Named.__init__: on the CPU: torch.zeros((), device=device)": (
        "timm draws on that device to round averages of 16 bits, which are refused"
    ),
    "pipeline.measurement.clock, Clock.events: without after.synchronize()": (
        "the step has waited for its devices when it asks for the times"
    ),
    "pipeline.job.mesh_job, _await_beside: without torch.cuda.set_device(device)": (
        "NCCL is told the device; on a GPU it spares a context on the first one"
    ),
    "pipeline.wire.streams, _End._run: without torch.cuda.set_device(self.link.device)": (
        "all that the thread does names its device; on a GPU it spares a context on the first one"
    ),
}


@functools.cache
def run_unchanged(machine: Machine, scenario: Scenario) -> list[Answer]:
    answers = machine.attempt(scenario.num_processes, scenario.function, *scenario.args, watched=WATCHED)
    for answer in answers:
        assert not answer.error and not answer.faults, answer
    return answers


def notice(mutant: Mutant, machine: Machine, seconds: float) -> str:
    """Return what a scenario that reaches the change shows: errors, silence, other numbers or faults; nothing if none.

    The call ends at the first error or fault, and the processes that are then left have not answered.
    """
    reaching = [
        (scenario, expected)
        for scenario, expected in ((scenario, run_unchanged(machine, scenario)) for scenario in SCENARIOS)
        if any((mutant.module, mutant.number) in answer.reached for answer in expected)
    ]
    assert reaching, f"no scenario comes by {mutant}: add one that does"
    # The first notices most; then those are asked that cost least. Alike ones need less time at once.
    first, *others = reaching
    for part in [[first], *(list(alike) for _, alike in groupby(sorted(others, key=_cost), key=_cost))]:
        found = machine.attempt_at_once([scenario[:3] for scenario, _ in part], mutant=mutant, seconds=seconds)
        for answers, (scenario, expected) in zip(found, part, strict=True):
            if differences := list(filter(None, map(_compare, answers, expected))):
                return f"{scenario}: {'; '.join(differences)}"
    return ""


def _cost(reaching: tuple[Scenario, list[Answer]]) -> int:
    scenario, _ = reaching
    return 0 if scenario.hangs else scenario.num_processes


def _compare(found: Answer, expected: Answer) -> str:
    if found.error or found.faults:
        return "; ".join([found.error, *found.faults])
    differing = [name for name, value in found.value.items() if not np.array_equal(value, expected.value[name])]
    return "; ".join(f"{name}: {found.value[name]}, not {expected.value[name]}" for name in differing)


@pytest.mark.slow
@pytest.mark.xdist_group("mutants")  # the unchanged scenarios run once
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_what_is_taken_out_is_noticed(mutant: Mutant, simulated: Machine) -> None:
    reason = EQUIVALENT.get(str(mutant))
    # What is equivalent never hangs; a machine that does much else may be slow.
    noticed = notice(mutant, simulated, SECONDS if reason is None else 6 * SECONDS)
    if reason is None:
        assert noticed, f"{mutant}: nobody noticed"
    else:
        assert not noticed, f"{mutant}: {reason}, but {noticed}"


def test_every_equivalent_mutant_exists() -> None:
    assert set(EQUIVALENT) <= {str(mutant) for mutant in MUTANTS}
