"""The examples, run as a user runs them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.program_server import TORCHRUN, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str, num_processes: int = 1) -> str:
    if num_processes == 1:
        done = run_program(EXAMPLES / name, *arguments)
    else:
        launcher = ("--standalone", "--nproc-per-node", str(num_processes))
        done = run_program(TORCHRUN, *launcher, str(EXAMPLES / name), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in (folder / "checkpoints" / f"step-{step:08}").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_an_own_model_is_trained_and_resumed_to_the_same_weights(tmp_path: Path) -> None:
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) < 60
    run("own_model.py", str(tmp_path / "whole"), num_processes=2)
    accuracy = [
        line["test/top1"]
        for line in map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
        if "test/top1" in line
    ]
    assert len(accuracy) == 3 and accuracy[-1] > 0.95
    # What a run that was killed after step 80 leaves behind.
    shutil.copytree(tmp_path / "whole", tmp_path / "broken", symlinks=True)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-00000096")
    for pointer in ("latest", "best"):
        (tmp_path / "broken" / "checkpoints" / pointer).unlink(missing_ok=True)
    run("own_model.py", str(tmp_path / "broken"), num_processes=2)
    whole, resumed = weights(tmp_path / "whole", 96), weights(tmp_path / "broken", 96)
    assert whole.keys() == resumed.keys() and len(whole) > 6
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


@pytest.mark.parametrize(("name", "num_processes"), [("from_torchgpipe.py", 1), ("from_torch_pipelining.py", 2)])
def test_the_same_training_there_and_here_has_the_same_losses(name: str, num_processes: int) -> None:
    lines = run(name, num_processes=num_processes).splitlines()
    pairs = [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in lines]
    assert len(pairs) == 5
    for there, here in pairs:
        assert here == pytest.approx(there, abs=3e-6)


def test_an_own_model_is_planned_and_its_schedules_compared() -> None:
    said = run("plan_own_model.py")
    verdicts = re.findall(r"^(fits|does not fit)", said, re.MULTILINE)
    seconds = [float(found) for found in re.findall(r"^Planned step: ([\d.]+) s", said, re.MULTILINE)]
    assert "4,835,217,664 parameters" in said and verdicts == ["does not fit", "fits", "fits"]
    assert seconds[0] == seconds[1] > seconds[2]
