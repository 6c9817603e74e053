"""The private interface of OmegaConf 2.3 that shows what a file says, before an interpolation becomes a value."""

from collections.abc import Iterator
from typing import Any

from omegaconf import Container, ListConfig


def list_raw(node: Container) -> Iterator[tuple[Any, Any, Any]]:
    """Yield of each entry of a dict or a list its key, its node, and what was written there."""
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for key in keys:
        child: Any = node._get_node(key)
        yield key, child, child._value()
