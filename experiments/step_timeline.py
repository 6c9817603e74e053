"""Record when each task of a real step ran: the small models of Table 2 in two stages, for the notebooks.

    python -m experiments.step_timeline

Trains each model with train.py for a few steps, with one core per stage, and reads the tasks of the last step. It takes
the run with the fastest step, because other programs can only slow a step down. Two minutes on two idle cores.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.program import StudyProgram, track
from gpipe.programs.outcome import TRACE_FILE
from gpipe.records import RECORD_FILE, Record, command_line, read_records
from reproductions import ROOT
from reproductions.table2_throughput.tables import STEP_TIMELINE, step_timeline

CLAIM = "table2_throughput"
EXPERIMENTS = ("table2_amoebanet_d_laptop", "table2_transformer_lm_laptop")
SHAPE = ("pipeline.num_stages=2", "pipeline.num_microbatches=8", "trainer.timeline_every_steps=1")


def read_events(trace: Path) -> list[list[Any]]:
    """Return a trace's tasks as rows (kind, stage, micro-batch, start, end), in seconds since the first one began."""
    tasks = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    begin = min(task["ts"] for task in tasks)
    rows = []
    for task in tasks:
        start, end = ((seconds - begin) / 1e6 for seconds in (task["ts"], task["ts"] + task["dur"]))
        rows.append([task["cat"], task["args"]["stage"], task["args"]["micro_batch"], round(start, 6), round(end, 6)])
    return rows


def run(experiment: str) -> Record:
    """Train a model of Table 2 and return the run's record, with the tasks of its last step."""
    command = ["train.py", f"+experiment={experiment}", *SHAPE]
    with TemporaryDirectory() as folder:
        train = [sys.executable, *command, f"hydra.run.dir={folder}/run"]
        subprocess.run(train, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        record = read_records(Path(folder) / "run" / RECORD_FILE)[0]
        events = read_events(Path(folder) / "run" / TRACE_FILE)
    kept = {key: record.results[key] for key in ("equal_stages_bubble", "partitions")}
    results = {**kept, "num_devices": record.config["pipeline"]["num_stages"], "events": events}
    return replace(record, command=command_line(), experiment=STEP_TIMELINE.experiment, results=results)


def find_quickest(experiment: str, num_runs: int) -> Record:
    """Return the record of the run whose last step was the quickest, with the number of runs."""
    records = [run(experiment) for _ in track(range(num_runs), f"runs of {experiment}")]
    best = min(records, key=lambda record: max(end for *_, end in record.results["events"]))
    return replace(best, results={"num_runs": num_runs, **best.results})


if __name__ == "__main__":
    tables = {CLAIM: [step_timeline, *STEP_TIMELINE.tables]}
    program = StudyProgram(__doc__, tables, rounds=4, what_rounds_are="runs of each model")
    options = program.parse()
    found = [find_quickest(experiment, options.rounds) for experiment in EXPERIMENTS]
    program.publish({CLAIM: found})
