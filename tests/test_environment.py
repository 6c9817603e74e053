"""pyproject.toml, the two locks, environment.yml and the Makefile agree."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from gpipe._compat.fairseq import VERSION

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^\s*(?:- )?(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;#]+)", re.MULTILINE)
RUN, DEVELOPMENT = ((ROOT / f"requirements{name}.lock").read_text() for name in ("", "-dev"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RUN_EXTRAS = ("train", "data", "translation", "sweeps")  # as in the Makefile
NEEDED = [requirement for name in RUN_EXTRAS for requirement in EXTRAS[name]]
WANTED = [requirement for name in EXTRAS.keys() - set(RUN_EXTRAS) for requirement in EXTRAS[name]]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in requirements}


def pins(text: str) -> set[tuple[str, str]]:
    return {(match["name"], match["version"]) for match in PIN.finditer(text)}


def conda_pins() -> set[tuple[str, str]]:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (from_pip,) = (entry["pip"] for entry in dependencies if isinstance(entry, dict))
    return pins("\n".join(from_pip))


def test_the_conda_environment_pins_every_declared_package_as_the_lock_does() -> None:
    assert conda_pins() - pins(DEVELOPMENT) == set()
    assert set(dict(conda_pins())) == names(PROJECT["dependencies"] + NEEDED + WANTED)


def test_one_lock_has_what_a_run_needs_and_the_other_what_tests_need_too() -> None:
    run = set(dict(pins(RUN)))
    assert names(PROJECT["dependencies"] + NEEDED) - run == set()
    assert names(WANTED) & run == set()
    assert names(WANTED) - set(dict(pins(DEVELOPMENT))) == set()
    assert pins(RUN) - pins(DEVELOPMENT) == set()


@pytest.mark.parametrize("lock", [RUN, DEVELOPMENT], ids=["run", "development"])
def test_a_lock_installs_with_a_cpu_and_with_a_cuda_build_of_torch_and_names_no_host(lock: str) -> None:
    versions = dict(pins(lock))
    assert not [name for name in versions if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert "+" not in versions["torch"]
    assert "://" not in lock
    assert "--" not in lock


def test_the_engine_alone_requires_torch_alone() -> None:
    """What a started interpreter loads of it is in test_imports."""
    assert names(PROJECT["dependencies"]) == {"torch"}


def test_the_citation_and_the_change_log_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] and citation["title"] == PROJECT["name"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == PROJECT["version"]


def test_the_makefile_and_the_workflow_install_what_the_locks_have() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"RUN := {' '.join(RUN_EXTRAS)}\n" in makefile
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in steps


def test_fairseq_is_installed_beside_the_locks_and_in_one_version() -> None:
    assert "fairseq" not in dict(pins(DEVELOPMENT)).keys() | names(PROJECT["dependencies"] + NEEDED + WANTED)
    for file in ("Makefile", "environment.yml"):
        assert re.findall(r"fairseq==([\d.]*\d)", (ROOT / file).read_text()) == [VERSION], file


def test_the_guides_install_torchgpipe_where_they_run_it_in_the_version_of_the_lock() -> None:
    for page in ("from_peers.md", "reproducing.md"):
        installed = re.findall(r"^    pip install (.*)$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
        assert installed == [f"torchgpipe=={dict(pins(DEVELOPMENT))['torchgpipe']}"], page


def test_a_first_run_compiles_nothing() -> None:
    """Only translation and the tests wait for fairseq, which takes a compiler and a minute and a half."""
    rules = re.findall(r"^([.a-z/]+):([^#=\n]*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needed = {target: prerequisites.split() for target, prerequisites in rules}

    def everything(target: str) -> set[str]:
        return {target}.union(*(everything(name) for name in needed.get(target, ())))

    waiting = {target for target in needed if ".venv/fairseq" in everything(target)}
    assert waiting == {"translation", "test", "quicktest", "reliability", ".venv/fairseq"}
