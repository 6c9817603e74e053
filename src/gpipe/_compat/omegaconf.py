"""The private interface of OmegaConf 2.3 that returns values as written, with interpolations unresolved."""

from collections.abc import Iterator
from typing import Any

from omegaconf import Container, ListConfig


def list_raw(node: Container) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the key, the node and the value as written of each entry of a dict or a list."""
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for key in keys:
        child: Any = node._get_node(key)
        yield key, child, child._value()
