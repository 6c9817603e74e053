"""Refuse files of settings that would fill the memory or never end, before they are loaded or resolved.

A file in a `--config-dir` may be a stranger's. OmegaConf copies what an alias stands for, and resolves an interpolation
anew at each use. So a file of ten lines may stand for a billion values: each line uses the one before twice. An alias
inside its own anchor stands for infinitely many.
"""

import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import yaml  # noqa: TID251 - its events alone: nothing is loaded
from hydra.errors import ConfigCompositionException
from omegaconf import Container
from omegaconf.errors import OmegaConfBaseException

from gpipe._compat.omegaconf import list_raw

_MAX_BYTES = 2**20
_MAX_VALUES = 10_000
_MAX_DEPTH = 50
MAX_FILES = 500  # that one composition may load; a file counts each time that it is named
_MAX_COST = 200_000  # half a second; our own settings cost 2,000 at most
_COST_OF_ONE = 100  # resolving a value costs as much as a hundred of its characters


def refuse_hostile_yaml(path: Path) -> None:
    """Raise ConfigCompositionException unless the file is small and finite; leave other faults to the loader."""
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise _refusal(path, "is not a regular file, expected a YAML file: name another")
    if status.st_size > _MAX_BYTES:
        raise _refusal(path, f"has {status.st_size:,} bytes, expected at most {_MAX_BYTES:,}: it holds no settings")
    try:
        _walk(path, yaml.parse(path.read_text("utf-8"), Loader=yaml.CSafeLoader))
    except UnicodeDecodeError:
        raise _refusal(path, "is not UTF-8, expected a YAML file: convert it") from None
    except yaml.YAMLError:
        return


def _walk(path: Path, events: Iterable[yaml.Event]) -> None:
    """Count the values that a file stands for, without creating them."""
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []  # anchors of the collections around, and the count before each
    num_values = 0
    for event in events:
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == around for around, _ in opened):
                line = event.start_mark.line + 1
                raise _refusal(
                    path, f"has an alias to what contains it in line {line}, so it never ends: remove *{anchor}"
                )
            num_values += sizes.get(str(anchor), 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((anchor, num_values))
            num_values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[str(anchor)] = num_values - before
        elif isinstance(event, yaml.ScalarEvent):
            num_values += 1
            sizes[str(anchor)] = 1
        if num_values > _MAX_VALUES:
            raise _refusal(path, f"stands for more than {_MAX_VALUES:,} values, with its aliases: shorten it")
        if len(opened) > _MAX_DEPTH:
            raise _refusal(path, f"is nested more than {_MAX_DEPTH} levels deep: flatten it")


def _refusal(path: Path, fault: str) -> ConfigCompositionException:
    return ConfigCompositionException(f"{path} {fault}.")


def refuse_endless_interpolations(node: Container, place: str = "") -> None:
    """Raise ConfigCompositionException for a value whose interpolations stand for too much; ignore other faults."""
    for key, child, value in list_raw(node):
        inside = f"{place}.{key}" if place else str(key)
        if isinstance(value, str) and value.count("${") > 1:  # a chain of single ones is no longer than the files
            if _costs_too_much(node, key):
                shown = value if len(value) < 100 else f"{value[:100]}..."
                raise ConfigCompositionException(
                    f"{inside} is {shown}, whose interpolations stand for too many values or characters: write the "
                    "value itself."
                )
        elif isinstance(child, Container) and isinstance(value, dict | list):
            refuse_endless_interpolations(child, inside)


def _costs_too_much(node: Container, key: Any) -> bool:
    """Resolve a value, and count what its interpolations cost; beyond the limit they resolve to nothing."""
    find, cost = Container.resolve_parse_tree, 0

    @wraps(find)
    def find_and_count(self: Container, *args: Any, **settings: Any) -> Any:
        nonlocal cost
        found = None if cost > _MAX_COST else find(self, *args, **settings)
        cost += _COST_OF_ONE + (len(found) if isinstance(found, str) else 0)
        return found

    Container.resolve_parse_tree = find_and_count  # type: ignore[method-assign]
    try:
        with suppress(OmegaConfBaseException):
            node[key]
    finally:
        Container.resolve_parse_tree = find  # type: ignore[method-assign]
    return cost > _MAX_COST
