"""Fixtures that tests of several folders use."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra import initialize_config_dir
from hypothesis import settings

from gpipe.config import register_schemas
from tests.support.process_pool import ProcessPool

CONF = Path(__file__).parents[1] / "conf"
PROGRAMS = Path(__file__).parent / "programs"
# For the programs that tests start, beside other tests: threads that share a core wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs inherit what is ignored: under nohup, the tests of a closed window would wait for ever.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("any machine", deadline=None)  # a loaded machine is slow, which is no defect
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of whole programs first: they take longest, and the last file leaves the other workers idle."""
    items.sort(key=lambda item: not item.path.is_relative_to(PROGRAMS))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute with as many threads as each process of a pipeline does, so that bits can be compared."""
    torch.set_num_threads(1)


@pytest.fixture
def composer() -> Iterator[None]:
    """Let Hydra compose from conf/."""
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Four processes, for pipelines of up to four stages."""
    pool = ProcessPool(4)
    yield pool
    pool.close()
