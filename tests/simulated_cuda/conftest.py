"""The machines with GPUs that these tests run on."""

from collections.abc import Iterator

import pytest

from tests.simulated_cuda.machine import Machine


@pytest.fixture(scope="session")
def simulated() -> Iterator[Machine]:
    """A machine with simulated GPUs."""
    made = Machine(simulated=True)
    yield made
    made.close()


@pytest.fixture(scope="session")
def real() -> Iterator[Machine]:
    """This machine, whose GPUs are real."""
    made = Machine(simulated=False)
    yield made
    made.close()


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Machine:
    """The machine that the test's parameter names."""
    found: Machine = request.getfixturevalue(request.param)
    return found
