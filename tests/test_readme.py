"""What the README shows works as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_pipelines_a_model_in_at_most_fifteen_lines() -> None:
    match = re.search(r"<!-- example -->\n```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert match is not None
    example = match[1]
    assert len(example.splitlines()) <= 15
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+ torch\.Size\(\[64, 10\]\)\n", done.stdout)


def test_every_file_and_folder_that_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text("utf-8")):
        assert (ROOT / link).exists(), link
