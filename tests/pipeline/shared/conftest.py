"""The layouts of two replicas that the tests of this folder compare with the plain model."""

from __future__ import annotations

import pytest

from tests.pipeline.shared.replica_case import LAYOUTS, Layout


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout.schedule}-{layout.partitions}")
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout
