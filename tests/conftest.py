"""Fixtures that tests of several folders use."""

from collections.abc import Iterator

import pytest
import torch

from tests.process_pool import ProcessPool


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute with as many threads as each process of a pipeline does, so that bits can be compared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Four processes, for pipelines of up to four stages."""
    pool = ProcessPool(4)
    yield pool
    pool.close()
