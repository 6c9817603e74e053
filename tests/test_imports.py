"""What a started interpreter loads; the contracts and bans of pyproject.toml have the rest of who may import whom."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpipe
import gpipe_torch

ROOT = Path(__file__).parents[1]
LOAD_ALL = """
import sys
from importlib import import_module
from pathlib import Path
source = Path({source!r})
before = {{name.partition(".")[0] for name in sys.modules}}
for path in sorted((source / "gpipe" / {part!r}).rglob("*.py")):
    import_module(".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"))
print(*sorted({{name.partition(".")[0] for name in sys.modules}} - before))
"""
# Each way to run code that is data, to unpack an archive, or to start a shell; one line each.
DANGERS = """
import pickle
from pickle import loads
import yaml
from yaml import YAMLError, load
import tarfile
import zipfile
import runpy
import joblib
import urllib.request
import torch; torch.load(path)
import torch; torch.hub.load(path)
from torch import distributed as dist; dist.broadcast_object_list(values)
from torch import distributed as dist; dist.all_gather_object(values, value)
import hydra; hydra.utils.instantiate(config)
from hydra.utils import get_class
import fairseq
from fairseq_cli import preprocess
import os; os.system(text)
import os; os.popen(text)
import subprocess; subprocess.run(text, shell=True)
import shutil; shutil.unpack_archive(path)
import importlib; importlib.import_module(name)
from importlib import import_module
eval(text)
exec(text)
""".strip().splitlines()

# Private names of other packages, which may change with any version: one line each.
PRIVATE = """
from hydra._internal import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from multiprocessing import forkserver; forkserver._forkserver._stop()
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch import distributed as dist; dist.distributed_c10d._get_default_store()
import torch; torch._foreach_add_(tensors, 1)
import torch; torch._dynamo.reset()
import torch; torch.multiprocessing._prctl_pr_set_pdeathsig(9)
""".strip().splitlines()


def run(program: str) -> set[str]:
    """Return what a fresh interpreter prints, word by word."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def packages_of(part: str, first: str = "", then: str = "") -> set[str]:
    """Return the packages that every module of a part loads in a fresh interpreter, beside what a line loads first.

    The words that a program prints afterwards follow.
    """
    return run(first + LOAD_ALL.format(source=str(ROOT / "src"), part=part) + then)


def test_the_config_can_be_read_without_torch() -> None:
    packages = packages_of("config")
    assert "gpipe" in packages
    assert packages.isdisjoint({"torch", "torchvision", "timm", "numpy"})


REFUSED = """
import runpy, sys
for word in {words!r}:
    sys.argv = ["train.py", word]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        print(end.code)
print(*sys.modules)
"""


def test_a_setting_is_refused_in_a_line_before_anything_heavy_is_loaded() -> None:
    """So it takes no longer than --help."""
    words = ["trainer.batch_size=-1", "optimizer.momentum=inf", "trainer.max_steps=word", "a=b"]
    command = [sys.executable, "-c", REFUSED.format(words=words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *statuses, modules = done.stdout.splitlines()
    assert statuses == ["1"] * len(words)
    for word, line in zip(words, done.stderr.splitlines(), strict=True):
        assert line.startswith("error: ") and word.partition("=")[0] in line
    assert {"torch", "torchvision", "timm", "matplotlib", "wandb"}.isdisjoint(modules.split())


ASKED = """
import atexit, runpy, sys
from gpipe.launch import stops
atexit.register(lambda: print(*sys.modules))
stops.listen().request("SIGTERM")
sys.argv = ["train.py"]
runpy.run_path({program!r}, run_name="__main__")
"""


def test_a_start_that_is_asked_to_stop_ends_before_torch_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKED.format(program=str(ROOT / "train.py"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said, modules = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (75, "")
    assert said == "stopped by SIGTERM before the first step: repeat the command to resume."
    assert {"torch", "torchvision", "timm", "wandb"}.isdisjoint(modules.split())


# Then what new processes are forked from loads. At last, all public names come from a copy in which another project's
# module has gpipe's place.
AFTER_THE_ENGINE = """
from gpipe.programs.train import LOADED_ONCE
for module in LOADED_ONCE:
    import_module(module)
assert not torch.cuda.is_initialized()
for name in [name for name in sys.modules if name.partition(".")[0] == "gpipe"]:
    del sys.modules[name]
sys.path.insert(0, {folder!r})
import gpipe_torch as gpipe
from gpipe.models import transformer_lm
assert gpipe.Pipeline.__module__ == "gpipe.pipeline.engine", gpipe.Pipeline
assert gpipe.Pipeline.__init__.__code__.co_filename.startswith({folder!r})
print(*(name for name in dir(gpipe) if getattr(gpipe, name) is None))
"""
WITHOUT_GPUS = """
import torch, torch._dynamo, torch.distributed.tensor

def refuse(*_, **__):
    raise AssertionError("a GPU is asked for")

for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
"""


def test_the_engine_loads_torch_alone_what_is_loaded_once_asks_for_no_gpu_and_another_gpipe_takes_no_name_away(
    tmp_path: Path,
) -> None:
    """One interpreter has all three, because it takes seconds to load torch."""
    shutil.copytree(ROOT / "src", tmp_path / "src")
    (tmp_path / "src" / "gpipe" / "__init__.py").write_text("")  # as that of the distribution gpipe 1.0.0
    found = packages_of("pipeline", first=WITHOUT_GPUS, then=AFTER_THE_ENGINE.format(folder=str(tmp_path / "src")))
    assert found - set(sys.stdlib_module_names) == {"gpipe"}


def test_both_import_names_have_the_same_public_names() -> None:
    assert gpipe_torch.__all__ == gpipe.__all__ == dir(gpipe_torch)
    assert all(getattr(gpipe, name) is getattr(gpipe_torch, name) for name in gpipe.__all__)


@pytest.mark.parametrize("program", ["train", "predict", "translate", "plan"])
def test_threads_sleep_while_they_wait_in_a_torch_that_a_program_loads(program: str) -> None:
    """OpenMP reads its environment when torch is loaded."""
    code = f"""
import os, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder)
sys.path.insert(0, {str(ROOT)!r})
import {program}
import gpipe.programs.{program}
import torch
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout + done.stderr == "PASSIVE\n"


def test_what_starts_a_run_loads_no_table_of_a_page() -> None:
    """The tables take most of a second to load: scipy, and a module per claim."""
    modules = run("import runpy, sys; runpy.run_path('train.py', run_name='loaded'); print(*sys.modules)")
    assert "gpipe.config" in modules
    assert not [
        name for name in modules if re.match(r"scipy$|matplotlib$|(gpipe|reproductions)\..*(tables|reproduction)", name)
    ]


def test_no_program_opens_a_pickle_of_numpys_or_imports_by_a_builtin() -> None:
    """What ruff cannot ban: a call of np.load has to say allow_pickle=False itself."""
    folders = (ROOT / "src", ROOT / "experiments", ROOT / "reproductions")
    for path in [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]:
        text = path.read_text()
        assert "__import__(" not in text, path
        assert all("allow_pickle=False" in call for call in re.findall(r"\b(?:np|numpy)\.load\((.*)\)", text)), path
        assert set(re.findall(r"allow_pickle\s*=\s*(\w+)", text)) <= {"False"}, path


def accepted_by_ruff(lines: list[str], place: str) -> list[str]:
    """Return which of some lines of a file at a place no rule refuses."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "S,TID251", "--output-format", "concise", "-"]
    command += ["--stdin-filename", place]
    done = subprocess.run(command, check=False, cwd=ROOT, input="\n".join(lines), capture_output=True, text=True)
    refused = {int(line) for line in re.findall(r":(\d+):\d+: (?:S|TID)\d", done.stdout)}
    return [line for number, line in enumerate(lines, 1) if number not in refused]


@pytest.mark.parametrize("place", ["src/gpipe/programs/layout.py", "train.py", "experiments/program.py"])
def test_ruff_refuses_whatever_could_run_code_of_a_file_and_private_names_of_others(place: str) -> None:
    assert accepted_by_ruff(DANGERS, place) == accepted_by_ruff(PRIVATE, place) == []


def _is_type(name: str) -> bool:
    return name[0].isupper() and not name.isupper()


# One of each program: what starts it.
OF_EACH_PROGRAM = {"main", "start"}


def test_no_two_things_share_a_public_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src" / "gpipe").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            aliases = [target.id for target in targets if isinstance(target, ast.Name) and _is_type(target.id)]
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else aliases
            for name in names:
                homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    shared = {name: places for name, places in homes.items() if len(places) > 1 and not name.startswith("_")}
    assert shared.keys() == OF_EACH_PROGRAM, shared


def read_map(package: Path) -> set[str]:
    """Return the files that the docstring of a package names."""
    path = package / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None
    return set(re.findall(r"\w+\.py\b", text or ""))


def test_a_packages_docstring_or_the_one_above_says_what_each_file_is_for() -> None:
    source = ROOT / "src" / "gpipe"
    packages = {path.parent for path in source.rglob("__init__.py")} - {source, source / "_compat"}
    assert len(packages) > 15
    programs = {path.name for path in ROOT.glob("*.py")}
    for package in packages:
        files = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
        assert files <= read_map(package) | read_map(package.parent), package
        assert read_map(package) <= {path.name for path in package.rglob("*.py")} | programs, package
