"""The private interfaces of Hydra 1.3 that the gate of the settings and the messages of errors replace.

Hydra has no public hook between the files and what it composes of them, nor one around what it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hydra._internal import utils  # noqa: TID251
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # noqa: TID251
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository  # noqa: TID251

__all__ = ["CachingConfigRepository", "ConfigLoaderImpl", "IConfigRepository", "surround_runs"]


@contextmanager
def surround_runs(surrounding: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While the body runs, run what Hydra runs for a program in a context of its own."""
    report = utils.run_and_report

    def run_and_report(func: Callable[[], Any]) -> Any:
        def run() -> Any:
            with surrounding():
                return func()

        return report(run)

    utils.run_and_report = run_and_report
    try:
        yield
    finally:
        utils.run_and_report = report
