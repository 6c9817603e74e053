"""Measure how long pipeline=auto searches for the settings of the paper's largest models.

    python -m experiments.automatic_plans

Each search is a whole command, in its own process. Results are medians of wall-clock seconds. Three minutes on
two idle cores.
"""

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.program import StudyProgram, track
from reproductions.bubble.plans import AUTOMATIC_PLANS

ROOT = Path(__file__).parents[1]
DEVICES = ("device=h100", "num_devices=8", "pipeline=auto")
CASES = {
    "AmoebaNet-B (18,512)": ("+experiment=amoebanet_imagenet",),
    "T(64,16384,32)": (
        "+experiment=transformer_multilingual", "model.num_layers=64", "model.feedforward_size=16384",
        "model.num_heads=32",
    ),
}  # fmt: skip


def search(words: tuple[str, ...]) -> tuple[float, list[str]]:
    """Return the seconds of a search, and the cells of the row that it chose."""
    command = [sys.executable, str(ROOT / "plan.py"), *words, *DEVICES]
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    (row,) = (line for line in done.stdout.splitlines() if re.search(r"\bchosen\b", line))
    return seconds, [cell.strip() for cell in row.split("│")[1:-1]]


if __name__ == "__main__":
    tables = {"bubble": AUTOMATIC_PLANS.tables}
    program = StudyProgram(__doc__, tables, rounds=3, what_rounds_are="searches of each model")
    options = program.parse()
    found: dict[str, list[tuple[float, list[str]]]] = {model: [] for model in CASES}
    for _ in track(range(options.rounds), "rounds"):
        for model, words in CASES.items():
            found[model].append(search(words))
    rows = []
    for model, searches in found.items():
        shape, schedule, num_microbatches, recompute, step_seconds, peak, bubble, _ = searches[0][1]
        row = {"model": model, "seconds": statistics.median(seconds for seconds, _ in searches), "shape": shape}
        row |= {"schedule": schedule, "num_microbatches": int(num_microbatches), "recompute": recompute}
        rows.append(row | {"step_seconds": float(step_seconds), "peak": peak, "bubble": bubble})
    settings = {"rounds": options.rounds, "devices": list(DEVICES), "words": {k: list(v) for k, v in CASES.items()}}
    program.publish_record(AUTOMATIC_PLANS.make_record(settings, {"rows": rows}))
