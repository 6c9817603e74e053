"""The page of task independence names what was left out and what was refused."""

import re
from pathlib import Path

import pytest
import torch

import gpipe._compat.torchvision  # noqa: F401 - before timm

# isort: split

import timm
from timm.models import _registry as registry

from experiments.traced_models import OF_TIMM
from reproductions.task_independence.tables import TRACED_MODELS, traced_models

PAGE = Path(__file__).parents[2] / "reproductions" / "task_independence" / "README.md"
MOST = 60e6


def list_left_out() -> dict[str, list[str]]:
    """Return the models of each family of timm of which none was tried."""
    families: dict[str, list[str]] = {}
    for name in timm.list_models():
        if timm.models.model_entrypoint(name).__module__.startswith("timm."):  # other tests add models of their own
            families.setdefault(registry._model_to_module[name], []).append(name)
    tried = {name for names in OF_TIMM.values() for name in names.split()}
    return {family: names for family, names in families.items() if not tried & {*names}}


def test_a_refused_model_is_shown_with_the_place_and_the_reason() -> None:
    error = "A cannot be cut into layers: <...>/a.py, line 2: decides by self.training; name the submodule"
    model = {"library": "timm", "model": "a", "refused": error}
    record = TRACED_MODELS.make_record({}, {"models": [model]})
    row = "| timm: a | refused | `<...>/a.py, line 2: decides by self.training` |  |  |  |"
    assert row in traced_models([record]).splitlines()


def test_the_page_names_each_family_that_was_left_out() -> None:
    (said,) = re.findall(r"were left\s+out: (.*?)\.\n", PAGE.read_text("utf-8"), re.DOTALL)
    assert re.findall(r"\w+", said.replace(" and ", ", ")) == sorted(list_left_out())


@pytest.mark.slow
@pytest.mark.parametrize("family", list_left_out())
def test_all_models_of_a_family_that_was_left_out_are_large(family: str) -> None:
    for name in list_left_out()[family]:
        with torch.device("meta"):
            model = timm.create_model(name)
        assert sum(parameter.numel() for parameter in model.parameters()) > MOST
