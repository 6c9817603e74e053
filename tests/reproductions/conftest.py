"""The tests here make thousands of records, each of which would ask git twice where the repository stands."""

import functools
from collections.abc import Iterator

import pytest

from gpipe.records import git_state


@pytest.fixture(autouse=True, scope="module")
def git_is_asked_once() -> Iterator[None]:
    """Let all records of a module have the first one's answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpipe.records.git_state", functools.cache(git_state))
        yield
