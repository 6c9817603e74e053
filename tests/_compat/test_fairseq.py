"""The guard around fairseq: what its import leaves behind, and what is said where it is absent."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpipe._compat.fairseq import INSTALL, import_fairseq

CONF = Path(__file__).parents[2] / "conf"
MODULES = (
    "fairseq",
    "fairseq.data",
    "fairseq.models.transformer",
    "fairseq.scoring.bleu",
    "fairseq.sequence_generator",
    "fairseq_cli.preprocess",
)


def run(program: str) -> str:
    """Run a program in a process of its own, warnings as errors; return all that it prints."""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )
    assert outcome.returncode == 0, outcome.stdout
    return outcome.stdout


def test_the_import_leaves_the_process_as_it_was_and_our_configuration_composes() -> None:
    printed = run(f"""
import copy, dataclasses, logging, os, warnings
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from gpipe._compat.fairseq import import_fairseq
from gpipe.config import register_schemas, to_run

def state():
    root = logging.getLogger()
    return [
        (root.level, list(root.handlers), root.manager.disable, list(warnings.filters), dict(os.environ)),
        dataclasses.dataclass,
        copy.deepcopy(ConfigStore.instance().repo),
        torch.get_rng_state().tolist(),
    ]

register_schemas()
before, store = state(), ConfigStore.instance().repo
for module in {MODULES} * 2:
    assert import_fairseq(module).__name__ == module
assert state() == before
assert ConfigStore.instance().repo is store
with initialize_config_dir({str(CONF)!r}, version_base="1.3"):
    to_run(compose("train", ["+experiment=amoebanet_imagenet_laptop"]))
""")
    assert printed == ""


def test_without_fairseq_the_error_names_the_command_that_installs_it() -> None:
    printed = run("""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_cli"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from gpipe._compat.fairseq import FairseqMissing, import_fairseq
for module in ("fairseq", "fairseq.data", "fairseq_cli.preprocess"):
    try:
        import_fairseq(module)
    except FairseqMissing as error:
        print(error)
""")
    assert INSTALL == "python -m pip install --no-deps fairseq==0.12.2"
    assert printed.splitlines() == [
        f"{module} belongs to fairseq 0.12.2, which is not installed: run `make translation`, which needs a C++ "
        f"compiler (without make: `{INSTALL}`)."
        for module in ("fairseq", "fairseq.data", "fairseq_cli.preprocess")
    ]


def test_an_import_that_fails_half_way_fails_the_same_way_again() -> None:
    printed = run("""
import sys
sys.modules["bitarray"] = None
from gpipe._compat.fairseq import import_fairseq
for attempt in range(2):
    try:
        import_fairseq()
    except ModuleNotFoundError as error:
        print(error.name)
del sys.modules["bitarray"]
print(import_fairseq("fairseq.data").__name__)
""")
    assert printed.split() == ["bitarray", "bitarray", "fairseq.data"]


def test_a_module_that_fairseq_does_not_have_is_not_called_absent() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fairseq\.nonsense"):
        import_fairseq("fairseq.nonsense")
