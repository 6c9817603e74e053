"""The private interfaces of Hydra 1.3 that config/gate.py and the programs replace.

Hydra has no public hook between loading files and composing them, and none around what it runs.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

from hydra._internal import utils  # noqa: TID251
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # noqa: TID251
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository  # noqa: TID251

hydra_main: Any = sys.modules["hydra.main"]  # hydra itself has a function of this name
__all__ = ["CachingConfigRepository", "ConfigLoaderImpl", "IConfigRepository", "surround_runs"]


@contextmanager
def surround_runs(surrounding: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While the body runs, wrap each run by Hydra in a context, and accept -m anywhere on the command line.

    The context gets the errors of Hydra and its launchers too, of which Hydra prints more than a message: a wrong
    override, a typo in a YAML file, a folder that cannot be made, a cluster that cannot be reached.
    """
    report, make_parser, run = utils.run_and_report, hydra_main.get_args_parser, hydra_main._run_hydra

    def run_surrounded(*args: Any, **settings: Any) -> None:
        with surrounding():
            run(*args, **settings)

    def make_patient_parser() -> Any:
        parser = make_parser()
        parser.parse_args = partial(_parse, parser)
        parser.error = lambda message: _refuse(f"{message}: see --help")
        return parser

    utils.run_and_report = lambda func: func()  # Hydra's would print errors, as `surrounding` does
    hydra_main.get_args_parser, hydra_main._run_hydra = make_patient_parser, run_surrounded
    try:
        yield
    finally:
        utils.run_and_report, hydra_main.get_args_parser, hydra_main._run_hydra = report, make_parser, run


def _parse(parser: ArgumentParser) -> Namespace:
    """Parse the command line; refuse an option that is not safe, and one that would have no effect."""
    found = parser.parse_intermixed_args()
    if found.experimental_rerun is not None:
        _refuse("--experimental-rerun loads a pickle, which may run any code: start the run's command again")
    if found.package is not None and not found.cfg:
        _refuse("--package changes what --cfg prints: add --cfg job, or leave --package out")
    if found.resolve and not found.cfg and not found.help:
        _refuse("--resolve fills in what --cfg prints: add --cfg job, or leave --resolve out")
    return found


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}.", file=sys.stderr)
    raise SystemExit(2)
