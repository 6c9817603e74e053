"""Measure how close the engine comes to the bubble formula, beside its peers and a hand-written loop.

    python -m experiments.engine_overhead

The layers sleep for a set time, so K = 8 processes overlap on two cores. The engines take turns with the same stages in
the same K processes; torchgpipe supports only one process. Everything is measured twice, on the machine as it is
and next to one process per core that computes without pause. Results are medians. Six minutes.
"""

from __future__ import annotations

from contextlib import ExitStack

from experiments.engine_overhead.engines import STEPS, measure_grid
from experiments.engine_overhead.sleeping_layers import BACKWARD, FORWARD
from experiments.program import StudyProgram
from experiments.threads_under_load import BUSY, running
from gpipe.launch.devices import own_cores
from gpipe.records import make_record
from reproductions.bubble.overheads import engine_overhead, engine_overhead_run


def main() -> None:
    """Read the command line, measure, and record."""
    tables = {"bubble": [engine_overhead, engine_overhead_run]}
    program = StudyProgram(__doc__, tables, rounds=9, what_rounds_are=f"turns of each engine, of {STEPS} steps")
    options = program.parse()
    grid = measure_grid(options.rounds)
    with ExitStack() as stack:
        for _ in own_cores():
            stack.enter_context(running(BUSY))
        busy_grid = measure_grid(options.rounds)
    record = make_record(
        kind="measured",
        experiment="engine_overhead",
        config={"forward_seconds": FORWARD, "backward_seconds": BACKWARD, "rounds": options.rounds, "steps": STEPS},
        seed=0,
        results={"grid": grid, "busy_grid": busy_grid},
    )
    program.publish({"bubble": [record]})


if __name__ == "__main__":
    main()
