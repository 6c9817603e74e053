"""Refuse a YAML file of settings that is not a regular file, would fill the memory or never end, before it is loaded.

A file in a `--config-dir` may be a stranger's. OmegaConf copies what an alias stands for. So a file of ten lines may
stand for a billion values, and an alias inside its own anchor for infinitely many.
"""

import stat
from collections.abc import Iterable
from pathlib import Path

import yaml  # noqa: TID251 - its events alone: nothing is loaded
from hydra.errors import ConfigCompositionException

_MAX_BYTES = 2**20
_MAX_VALUES = 10_000
_MAX_DEPTH = 50
MAX_FILES = 500
"""How many files one composition may load; a file counts each time that it is named."""


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
