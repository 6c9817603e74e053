"""Processes as if each were on a host of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def host_of_its_own() -> Iterator[None]:
    """Let this process find no folder that the others could find: a pipeline's messages go over Gloo then."""
    before, tempfile.tempdir = tempfile.tempdir, "/nowhere"
    try:
        yield
    finally:
        tempfile.tempdir = before
