"""The inputs of a model that was cut: nested as the example was, of which the operations take the parts."""

from __future__ import annotations

from typing import Any, TypeAlias

Names: TypeAlias = int | list[str] | None
"""How many arguments an example has, or the names of its keyword arguments; None: it is one tensor."""


def name_inputs(example: Any) -> Names:
    """Return what the parts of an example are called."""
    return len(example) if isinstance(example, tuple) else [*example] if isinstance(example, dict) else None


def check_inputs(inputs: Any, names: Names) -> Any:
    """Return the inputs; refuse others than the example: an operation would take a row of a tensor for an argument.

    Raises:
        ValueError: they are nested in another way.
    """
    found = name_inputs(tuple(inputs) if isinstance(inputs, list) and isinstance(names, int) else inputs)
    is_complete = found == names or (isinstance(found, list) and isinstance(names, list) and {*names} <= {*found})
    if not is_complete:
        raise ValueError(f"the model's input is {_describe(found)}, but the example was {_describe(names)}; give it so")
    return inputs


def _describe(names: Names) -> str:
    if isinstance(names, list):
        return f"a dict of {', '.join(names)}"
    return "one value" if names is None else f"a tuple of {names}"
