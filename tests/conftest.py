"""Fixtures that tests of several folders use."""

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import initialize_config_dir
from hypothesis import settings

from gpipe.config import register_schemas
from gpipe.pipeline.layers import split_backward
from gpipe.training.numerics import set_numerics
from tests.support.process_pool import ProcessPool
from tests.support.program_server import REMEMBERED
from tests.support.remembered_settings import remember_settings

TESTS = Path(__file__).parent
CONF = TESTS.parent / "conf"
# What takes longest starts first: the last file or group leaves the other workers idle.
LONG = (
    "reliability/test_faults.py", "documentation/test_commands.py", "reliability/test_first_hour.py",
    "reliability/test_histories.py", "simulated_cuda/test_mutants.py", "simulated_cuda/test_rehearsal.py",
    "reliability/test_many_hosts.py", "experiments/test_image_throughput.py", "programs", "documentation",
    "end_to_end", "simulated_cuda", "notebooks", "tracing", "pipeline",
)  # fmt: skip
# Tests make much that a collection finds alive, such as configurations: a third of the time of composing one.
gc.set_threshold(50_000, 20, 20)
# For the programs that tests start, beside other tests: threads that share a core wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# inductor would start processes to compile in, each of which imports torch: half the time of compiling little.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Programs inherit what is ignored: under nohup, the tests of a closed window would wait for ever.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
split_backward.SMALL_PRODUCT = 0  # the layers of tests are small, and each is to wait that can
settings.register_profile("any machine", deadline=None)  # a loaded machine is slow, which is no defect
settings.load_profile("any machine")
remember_settings()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first."""
    items.sort(key=lambda item: _place(item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that groups are in force; spare each later collection of garbage what is loaded and collected: it stays."""
    if session.config.getoption("loadgroup", False):  # a worker of pytest-xdist, which puts a group behind each name
        alone = [item for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        assert not alone, f"pytest-xdist does not keep groups together with pytest {pytest.__version__}"
    gc.collect()
    gc.freeze()


@cache
def _place(path: Path) -> int:
    return next((place for place, name in enumerate(LONG) if path.is_relative_to(TESTS / name)), len(LONG))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute with as many threads as each process of a pipeline does, so that bits can be compared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    """Let torch take kernels that give the same bits each time: a run that an earlier test built may have left it."""
    set_numerics(deterministic=True, float32_matmul_precision="highest")


@pytest.fixture
def composer() -> Iterator[None]:
    """Let Hydra compose from conf/."""
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessPool]:
    """Six processes: for pipelines of up to six stages, or three replicas of two."""
    pool = ProcessPool(6)
    yield pool
    pool.close()


@pytest.fixture(autouse=True, scope="session")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name a folder for what all processes of the tests share: profiles of models, composed settings, servers."""
    if REMEMBERED in os.environ:  # these tests were started by a test
        return
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "remembered"
    folder.mkdir(exist_ok=True)
    os.environ[REMEMBERED] = str(folder)
