"""pyproject.toml, requirements.lock, environment.yml and the Makefile say the same."""

import re
import tomllib
from pathlib import Path

import yaml

from gpipe._compat.fairseq import VERSION

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"^\s*(?:- )?(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;#]+)", re.MULTILINE)
LOCK = (ROOT / "requirements.lock").read_text()


def declared() -> set[str]:
    """Return the names of the packages that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    return {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in requirements}


def locked() -> set[tuple[str, str]]:
    return {(match["name"], match["version"]) for match in PIN.finditer(LOCK)}


def conda_pins() -> set[tuple[str, str]]:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (from_pip,) = (entry["pip"] for entry in dependencies if isinstance(entry, dict))
    matches = [PIN.match(entry) for entry in from_pip]
    return {(match["name"], match["version"]) for match in matches if match}


def test_every_pin_of_the_conda_environment_is_the_locks() -> None:
    assert conda_pins() - locked() == set()


def test_the_conda_environment_pins_every_declared_package() -> None:
    assert {name for name, _ in conda_pins()} == declared()


def test_every_declared_package_is_locked() -> None:
    assert declared() - {name for name, _ in locked()} == set()


def test_the_lock_installs_with_a_cpu_and_with_a_cuda_build_of_torch() -> None:
    names = {name for name, _ in locked()}
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert "+" not in dict(locked())["torch"]


def test_the_lock_names_no_host() -> None:
    assert "://" not in LOCK
    assert "--" not in LOCK


def test_fairseq_is_installed_beside_the_lock_and_in_one_version() -> None:
    assert "fairseq" not in {name for name, _ in locked()} | declared()
    for file in ("Makefile", "environment.yml", "README.md"):
        assert re.findall(r"fairseq==([\d.]*\d)", (ROOT / file).read_text()) == [VERSION], file
