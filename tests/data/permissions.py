"""Permissions, which bind everybody but root, whom tests may be run by."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Be a user whom permissions bind, as they do not bind root."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
