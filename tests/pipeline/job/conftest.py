"""The processes that serve the tests of this folder, which survive errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.process_pool import ProcessPool


@pytest.fixture(scope="package")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(4)
    yield pool
    pool.close()
