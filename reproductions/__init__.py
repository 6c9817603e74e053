"""The paper's claims, one folder each, with a page, the paper's numbers, our records, and the tables made from them.

`python -m reproductions` renders every page.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The root of the repository."""
FOLDER = "reproductions"
RUNS_FILE = "runs.jsonl"
PAPER_FILE = "paper.csv"
