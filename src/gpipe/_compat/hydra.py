"""The private interfaces of Hydra 1.3 that the gate of the settings and the messages of errors replace.

Hydra has no public hook between the files and what it composes of them, nor one around what it runs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hydra._internal import utils  # noqa: TID251
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # noqa: TID251
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository  # noqa: TID251

hydra_main: Any = sys.modules["hydra.main"]  # hydra itself has a function of this name
__all__ = ["CachingConfigRepository", "ConfigLoaderImpl", "IConfigRepository", "surround_runs"]


@contextmanager
def surround_runs(surrounding: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While the body runs, run what Hydra runs for a program in a context of its own, and let -m stand anywhere."""
    report, make_parser = utils.run_and_report, hydra_main.get_args_parser

    def run_and_report(func: Callable[[], Any]) -> Any:
        def run() -> Any:
            with surrounding():
                return func()

        return report(run)

    def make_patient_parser() -> Any:
        parser = make_parser()
        parser.parse_args = parser.parse_intermixed_args
        return parser

    utils.run_and_report, hydra_main.get_args_parser = run_and_report, make_patient_parser
    try:
        yield
    finally:
        utils.run_and_report, hydra_main.get_args_parser = report, make_parser
