"""Plans of equal models share their profiles, in the tests' own processes."""

import os
from pathlib import Path

import pytest

from tests.support.program_server import REMEMBERED
from tests.support.remembered_profiles import remember_profiles


@pytest.fixture(autouse=True, scope="session")
def _remembered_profiles(remembered: None) -> None:
    remember_profiles(Path(os.environ[REMEMBERED]))
