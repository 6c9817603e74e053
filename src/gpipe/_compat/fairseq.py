"""Import fairseq 0.12.2, its last release, on current Python versions without side effects.

Its import affects the process in three ways, each of which is prevented:

- It declares dataclasses whose defaults are other dataclasses. Python 3.11 and later refuse that unless the defaults
  are hashable: during the import they are.
- It registers `config`, `model`, `task` ... with Hydra, which would shadow our own configurations: it gets a copy of
  Hydra's store.
- It configures the root logger, logs, and warns that `torch.jit.script` is deprecated: all is silenced and undone.
"""

import copy
import dataclasses
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module  # noqa: TID251 - fairseq can only be imported behind this guard
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hydra.core.config_store import ConfigStore

VERSION = "0.12.2"
INSTALL = f"python -m pip install --no-deps fairseq=={VERSION}"
_PACKAGES = ("fairseq", "fairseq_cli")  # one installation brings both
_dataclass: Any = dataclasses.dataclass


class FairseqMissing(ImportError):
    """fairseq is not installed: its requirements are outdated, so it cannot be a dependency of this package."""


def import_fairseq(module: str = "fairseq") -> ModuleType:
    """Import fairseq, or one of its modules, such as "fairseq.data" or "fairseq_cli.preprocess", and return it.

    Afterwards Hydra's store, the root logger, `dataclasses.dataclass` and the warning filters are as before.

    Raises:
        FairseqMissing: fairseq is not installed; the message has the command.
        ImportError: the import fails for another reason, such as no module of that name.
    """
    if module in sys.modules:
        return sys.modules[module]
    import_module("torch")  # first, so that its own dataclasses stay as they are
    before, store = set(sys.modules), ConfigStore.instance()
    try:
        with (
            patch.object(dataclasses, "dataclass", _hashable_dataclass),
            patch.object(store, "repo", copy.deepcopy(store.repo)),
            _untouched_logging(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            return import_module(module)
    except BaseException as error:
        # A half-imported fairseq would make the next attempt fail with another error.
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in _PACKAGES:
                del sys.modules[name]
        if isinstance(error, ModuleNotFoundError) and error.name in _PACKAGES:
            raise FairseqMissing(
                f"{module} belongs to fairseq {VERSION}, which is not installed: run `make translation`, which needs a "
                f"C++ compiler (without make: `{INSTALL}`).",
                name=error.name,
            ) from error
        raise


def _hashable_dataclass(cls: type | None = None, /, **options: Any) -> Any:
    """Return what dataclasses.dataclass does, but hashable if it is fairseq's."""

    def decorate(cls: type) -> Any:
        hashable = {"unsafe_hash": True} if cls.__module__.startswith("fairseq") else {}
        return _dataclass(cls, **(options | hashable))

    return decorate if cls is None else decorate(cls)


@contextmanager
def _untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.disable(disabled)
