"""What is said of plans, beside each other and beside what a step took."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from gpipe.pipeline.schedule import Kind, Rematerialize, Task
from gpipe.pipeline.timeline import Event, Timeline
from gpipe.planning.accelerator import LayerSeconds, Speed, find_accelerator
from gpipe.planning.report import compare_with_plan, print_choices
from gpipe.planning.step import Plan, Setting, plan_step
from tests.planning.small_profiles import LOSS, layer

V100 = find_accelerator("v100")
PROFILES = [*(layer(10**6, 10**6) for _ in range(4)), LOSS]


def plan_of(setting: Setting, *, slow: int | None = None) -> Plan:
    """Plan layers that take 1 ms forward and 2 ms backward; one may be twice as slow."""
    seconds = [LayerSeconds(1e-3, 1e-3, 2e-3)] * 4 + [LayerSeconds(0, 0, 0)]
    if slow is not None:
        seconds[slow] = LayerSeconds(2e-3, 2e-3, 4e-3)
    cut = [4 // setting.num_stages] * setting.num_stages
    return plan_step(PROFILES, seconds, cut, setting, replace(Speed.of(V100, "float32"), hop_seconds=0.0))


def test_the_first_step_stands_beside_its_plan_stage_by_stage() -> None:
    plan = plan_of(Setting(2, 1, Rematerialize.NEVER))
    events = [
        Event(Task(Kind.FORWARD, 0, 0), 0.0, 0.004),
        Event(Task(Kind.FORWARD, 1, 0), 0.004, 0.007),
        Event(Task(Kind.BACKWARD, 1, 0), 0.007, 0.012),
        Event(Task(Kind.BACKWARD, 0, 0), 0.012, 0.0185),
    ]
    title, *stages, step = compare_with_plan(plan, Timeline(tuple(events), 2, (0, 1))).splitlines()
    assert title == "milliseconds per micro-batch, measured (planned):"
    assert stages == ["stage 0: forward 4 (2), backward 6.5 (4)", "stage 1: forward 3 (2), backward 5 (4)"]
    assert step.startswith("the step, from its first task to its last: 18.5 (12")


def test_five_settings_are_printed_with_peak_and_bubble_and_why_each_lost() -> None:
    settings = [Setting(2, 8, Rematerialize.NEVER), Setting(2, 4, Rematerialize.NEVER), Setting(2, 8)]
    plans = [*map(plan_of, settings), plan_of(Setting(2, 2)), plan_of(Setting(2, 8), slow=3)]
    stream = io.StringIO()
    print_choices(plans, V100, 2, Console(file=stream, width=200))
    title, *table = stream.getvalue().splitlines()
    assert title == "The fastest ways to run it on 2 x v100, planned:"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table if "│" in line]
    assert len(rows) == 5
    for row, plan in zip(rows, plans, strict=True):
        assert row[0] == "1 x 2" and row[2] == str(plan.setting.num_microbatches)
        assert float(row[4]) == float(f"{plan.step_seconds:.3g}")
        assert float(row[5].split()[0]) == float(f"{plan.peak_bytes / 2**30:.3g}")
        assert row[6] == f"{plan.timeline.bubble:.1%}"
    reasons = [row[7] for row in rows]
    assert reasons[0] == "chosen" and all(reason.startswith("+") for reason in reasons[2:])
    assert ": recomputes " in reasons[2], "all micro-batches are recomputed"


def test_many_seconds_more_are_a_plain_number() -> None:
    plan, stream = plan_of(Setting(2, 4)), io.StringIO()
    slow = replace(plan, update_seconds=plan.update_seconds + 234)
    print_choices([plan, slow], V100, 2, Console(file=stream, width=200))
    assert ": updates 234 s more" in stream.getvalue()
