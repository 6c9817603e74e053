"""The guard around fairseq: what its import leaves behind, and what is said where it is absent."""

import json
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


# In one process, because importing torch and fairseq takes seconds: without fairseq, without a package that it needs,
# and with everything. Warnings are errors.
PROGRAM = f"""
import copy, dataclasses, json, logging, os, sys, warnings
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from gpipe._compat.fairseq import FairseqMissing, import_fairseq
from gpipe.config import register_schemas, to_run

def state():
    root = logging.getLogger()
    return [
        (root.level, list(root.handlers), root.manager.disable, list(warnings.filters), dict(os.environ)),
        dataclasses.dataclass,
        copy.deepcopy(ConfigStore.instance().repo),
        torch.get_rng_state().tolist(),
    ]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fairseq", "fairseq_cli"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

absent, broken = [], []
sys.meta_path.insert(0, Blocker())
for module in ("fairseq", "fairseq.data", "fairseq_cli.preprocess"):
    try:
        import_fairseq(module)
    except FairseqMissing as error:
        absent.append(str(error))
del sys.meta_path[0]

sys.modules["bitarray"] = None
for attempt in range(2):
    try:
        import_fairseq()
    except ModuleNotFoundError as error:
        broken.append(error.name)
del sys.modules["bitarray"]

register_schemas()
before, store = state(), ConfigStore.instance().repo
for module in {MODULES} * 2:
    assert import_fairseq(module).__name__ == module
assert state() == before
assert ConfigStore.instance().repo is store
with initialize_config_dir({str(CONF)!r}, version_base="1.3"):
    to_run(compose("train", ["+experiment=amoebanet_imagenet_laptop"]))
print(json.dumps([absent, broken]))
"""


def test_the_import_fails_with_a_remedy_or_leaves_the_process_as_it_was_and_our_configuration_composes() -> None:
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )
    assert outcome.returncode == 0, outcome.stdout
    absent, broken = json.loads(outcome.stdout)  # and nothing else is printed
    assert INSTALL == "python -m pip install --no-deps fairseq==0.12.2"
    assert absent == [
        f"{module} belongs to fairseq 0.12.2, which is not installed: run `make translation`, which needs a C++ "
        f"compiler (without make: `{INSTALL}`)."
        for module in ("fairseq", "fairseq.data", "fairseq_cli.preprocess")
    ]
    assert broken == ["bitarray", "bitarray"], "an import that fails half way fails the same way again"


def test_a_module_that_fairseq_does_not_have_is_not_called_absent() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fairseq\.nonsense"):
        import_fairseq("fairseq.nonsense")
