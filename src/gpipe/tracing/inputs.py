"""The inputs of a model that was cut: nested as the example was, of which the operations take the parts."""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import Any, TypeAlias

from torch import Tensor, nn

from gpipe.pipeline.microbatch import Examples

Form: TypeAlias = dict[Any, Any] | list[int | None] | None
"""The sizes of a tensor, None for any size; of a nest the forms of its parts, by name or number; None for None."""


def find_form(nest: Any, batch: int | None = None, *, are_sizes_read: bool = True) -> Form:
    """Return the form of inputs, or of an example.

    Args:
        nest: the inputs or the example.
        batch: the dimension of an example's tensors that may have any size, unless they are marked.
        are_sizes_read: by the model's code; if not, all may have any size.
    """
    if isinstance(nest, dict | tuple | list):
        parts = nest.items() if isinstance(nest, dict) else enumerate(nest)
        return {key: find_form(part, batch, are_sizes_read=are_sizes_read) for key, part in parts}
    if isinstance(nest, Examples):
        nest, batch = nest.tensor, nest.dimension
    if not isinstance(nest, Tensor):
        return None
    return [size if are_sizes_read and d != batch else None for d, size in enumerate(nest.shape)]


def name_arguments(model: nn.Module) -> list[str] | None:
    """Return the names of a model's arguments; None where it takes any."""
    found = signature(model.forward).parameters.values()
    return None if any(one.kind is one.VAR_KEYWORD for one in found) else [one.name for one in found]


def check_inputs(inputs: Any, form: Form, known: Collection[str] | None) -> Any:
    """Return the inputs; refuse others than the example: an operation would take a row of a tensor for an argument.

    Args:
        inputs: of the first layer. Entries that are no arguments of the model, such as columns of a data set, may stay.
        form: of the example.
        known: the names of the model's arguments, None for any: those that the example lacks would be ignored.
    """
    given = inputs
    if isinstance(inputs, dict) and isinstance(form, dict) and known is not None and form.keys() <= inputs.keys():
        given = {name: part for name, part in inputs.items() if name in form or name in known}
    _check("the model's input", find_form(given), form)
    return inputs


def _check(name: str, found: Any, form: Any) -> None:
    if type(found) is not type(form) or (isinstance(form, dict) and found.keys() != form.keys()):
        raise ValueError(f"{name} is {_describe(found)}, but the example was {_describe(form)}; give it so")
    if isinstance(form, dict):
        for key, part in form.items():
            _check(key if isinstance(key, str) else f"input {key}", found[key], part)
    elif form is not None and len(found) != len(form):
        raise ValueError(f"{name} has ndim {len(found)}, but the example had ndim {len(form)}; give as many dimensions")
    elif form is not None and any(size not in (None, own) for own, size in zip(found, form, strict=True)):
        expected = ", ".join("any number" if size is None else str(size) for size in form)
        raise ValueError(
            f"{name} has the sizes {', '.join(map(str, found))}, but the example had {expected}, and the model's code "
            "reads sizes; give inputs of the example's sizes, or name the submodules that read them, leaves=['...']"
        )


def _describe(form: Form) -> str:
    if not isinstance(form, dict):
        return "None" if form is None else "one value"
    return f"a dict of {', '.join(form)}" if isinstance(next(iter(form), 0), str) else f"a tuple of {len(form)}"
