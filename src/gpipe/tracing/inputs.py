"""The inputs of a model that was cut: nested as the example was, of which the operations take the parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

from gpipe.pipeline.microbatch import Examples

Names: TypeAlias = int | list[str] | None
"""How many arguments an example has, or the names of its keyword arguments; None: it is one tensor."""


Sizes: TypeAlias = dict[Any, Any] | list[int | None] | None
"""The sizes of a tensor, None for its examples; of a nest by the names or numbers of its parts; None: any sizes."""


def name_inputs(example: Any) -> Names:
    """Return what the parts of an example are called."""
    return len(example) if isinstance(example, tuple) else [*example] if isinstance(example, dict) else None


def find_sizes(example: Any) -> Sizes:
    """Return the sizes of an example's tensors."""
    if isinstance(example, Tensor):
        example = Examples(example, 0)
    if isinstance(example, Examples):
        return [None if d == example.dimension else size for d, size in enumerate(example.tensor.shape)]
    return (
        {key: find_sizes(part) for key, part in _parts(example)} if isinstance(example, dict | tuple | list) else None
    )


def check_inputs(inputs: Any, names: Names, sizes: Sizes = None) -> Any:
    """Return the inputs; refuse others than the example: an operation would take a row of a tensor for an argument.

    Args:
        inputs: of the first layer.
        names: of the example.
        sizes: of the example, where the model's code read any: they are constants in the layers.
    """
    found = name_inputs(tuple(inputs) if isinstance(inputs, list) and isinstance(names, int) else inputs)
    is_complete = found == names or (isinstance(found, list) and isinstance(names, list) and {*names} <= {*found})
    if not is_complete:
        raise ValueError(f"the model's input is {_describe(found)}, but the example was {_describe(names)}; give it so")
    if sizes is not None:
        _check_sizes("the model's input", inputs, sizes)
    return inputs


def _check_sizes(name: str, inputs: Any, sizes: Sizes) -> None:
    if isinstance(sizes, dict):
        for key, part in _parts(inputs):
            if key in sizes:
                _check_sizes(key if isinstance(key, str) else f"input {key}", part, sizes[key])
    elif isinstance(inputs, Tensor) and sizes is not None:
        shape = tuple(inputs.shape)
        if len(shape) != len(sizes) or any(size not in (None, own) for own, size in zip(shape, sizes, strict=True)):
            expected = ", ".join("any number" if size is None else str(size) for size in sizes)
            raise ValueError(
                f"{name} has the sizes {', '.join(map(str, shape))}, but the example had {expected}, and the model's "
                "code reads sizes; give inputs of the example's sizes, or name the submodules that read them, "
                "leaves=['...']"
            )


def _parts(nest: Any) -> Iterator[tuple[Any, Any]]:
    return iter(nest.items() if isinstance(nest, dict) else enumerate(nest))


def _describe(names: Names) -> str:
    if isinstance(names, list):
        return f"a dict of {', '.join(names)}"
    return "one value" if names is None else f"a tuple of {names}"
