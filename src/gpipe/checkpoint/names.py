"""Names of tensors: which layer one belongs to, and a few of many in a message."""

import re
from collections.abc import Sequence

from gpipe.checkpoint.errors import CheckpointError

NUM_NAMED = 3  # so many names of wrong tensors go into a message
_LAYER_NAME = re.compile(r"layers\.(0|[1-9]\d{0,8})\..+")


def layer_of(name: str) -> int:
    """Return the index of the layer that a tensor called `layers.<i>.<name>` belongs to."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"The tensor name {name!r} is not of the form layers.<i>.<name>: rename it.")
    return int(match[1])


def parameter_of(key: str) -> str:
    """Return the parameter that the optimiser's `<parameter name>/<slot>` belongs to; that of a parameter is itself."""
    return key.rsplit("/", 1)[0]


def describe_names(names: Sequence[str]) -> str:
    """List the first few names and count the rest, for a message."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
