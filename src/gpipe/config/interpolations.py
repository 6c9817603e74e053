"""Refuse interpolations that would fill the memory or never end, before anything else resolves them.

OmegaConf resolves an interpolation anew at each use. So thirty lines that each use the line before twice stand for a
billion values.
"""

from contextlib import suppress
from functools import wraps
from typing import Any

from hydra.errors import ConfigCompositionException
from omegaconf import Container
from omegaconf.errors import OmegaConfBaseException

from gpipe._compat.omegaconf import list_raw

_MAX_COST = 200_000  # half a second; our own settings cost 2,000 at most
_COST_OF_ONE = 100  # resolving a value costs as much as a hundred of its characters


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
