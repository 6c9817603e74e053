"""What the README shows works as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from safetensors.torch import save_file

from gpipe.config import to_run
from gpipe.programs.build import build_layers

ROOT = Path(__file__).parents[1]


def code(name: str) -> str:
    """Return the code under a comment with this name."""
    match = re.search(f"<!-- {name} -->\n```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_example_pipelines_a_model_in_at_most_fifteen_lines() -> None:
    example = code("example")
    assert len(example.splitlines()) <= 15
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+ torch\.Size\(\[64, 10\]\)\n", done.stdout)


@pytest.mark.usefixtures("composer")
def test_what_quickstart_trains_is_loaded_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = build_layers(to_run(compose("train", overrides=["+experiment=amoebanet_imagenet_laptop"])))
    saved = {name: torch.full_like(tensor, 0.5, device="cpu") for name, tensor in layers.state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code("export"), found)
    loaded = found["model"].state_dict()
    assert loaded.keys() == saved.keys() and len(saved) > 400
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())


def test_every_file_and_folder_that_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text("utf-8")):
        assert (ROOT / link).exists(), link
