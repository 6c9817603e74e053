"""Measure how close the engine comes to the bubble formula, beside its peers and a hand-written loop.

    python -m experiments.engine_overhead

The layers sleep for a set time, so K = 8 processes overlap on two cores. The engines take turns with the same stages in
the same K processes over Gloo; torchgpipe supports only one process. The figures are medians. Adds a record to
reproductions/bubble/ and renders all pages. Five minutes.
"""

from __future__ import annotations

import argparse

from experiments.engine_overhead.engines import STEPS, measure_grid
from experiments.engine_overhead.sleeping_layers import BACKWARD, FORWARD
from gpipe.records import make_record
from reproductions.additions import add_record


def main() -> None:
    """Read the command line, measure, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=11, help=f"turns that count, of each engine; a turn has {STEPS} steps"
    )
    options = parser.parse_args()
    record = make_record(
        kind="measured",
        experiment="engine_overhead",
        config={"forward_seconds": FORWARD, "backward_seconds": BACKWARD, "rounds": options.rounds, "steps": STEPS},
        seed=0,
        results={"grid": measure_grid(options.rounds)},
    )
    add_record("bubble", record)


if __name__ == "__main__":
    main()
