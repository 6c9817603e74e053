"""Check that the inputs of a model that was cut are nested like its example."""

from __future__ import annotations

from collections.abc import Collection, Container
from inspect import signature
from typing import Any, TypeAlias

from torch import Tensor, nn

from gpipe.pipeline.microbatch import Examples

Form: TypeAlias = dict[Any, Any] | list[int | None] | None
"""The sizes of a tensor, None for any size; for a nest, the forms of its parts by name or number; None for None."""


def find_form(nest: Any, batch: int | None = None, read: Container[int] | None = None) -> Form:
    """Return the form of inputs, or of an example.

    Args:
        nest: the inputs or the example.
        batch: the dimension of an example's tensors that may have any size, unless they are marked.
        read: sizes of the example that the model's code may read, None for all; others may have any value.
    """
    if isinstance(nest, dict | tuple | list):
        parts = nest if isinstance(nest, dict) else dict(enumerate(nest))
        if any(type(key) not in (str, int) for key in parts):  # such as enums, which cannot be written in layers' code
            parts = dict(enumerate(parts.values()))
        return {key: find_form(part, batch, read) for key, part in parts.items()}
    if isinstance(nest, Examples):
        nest, batch = nest.tensor, nest.dimension
    if not isinstance(nest, Tensor):
        return None
    return [size if d != batch and (read is None or size in read) else None for d, size in enumerate(nest.shape)]


def name_arguments(model: nn.Module) -> list[str] | None:
    """Return the names of a model's arguments, as far as they are known; None if it takes any."""
    try:
        found = signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return []
    return None if any(one.kind is one.VAR_KEYWORD for one in found) else [one.name for one in found]


def check_inputs(inputs: Any, form: Form, known: Collection[str] | None) -> Any:
    """Return the inputs; refuse those unlike the example: an operation might take a row of a tensor for an argument.

    Args:
        inputs: of the first layer. Extra entries that are not arguments of the model, such as columns of a data set,
            are allowed.
        form: of the example.
        known: the names of the model's arguments, None for any; those that the example lacks would be ignored.

    Raises:
        ValueError: the inputs are nested differently, or have other dimensions or other sizes that the model reads.
    """
    found = find_form(inputs)
    if form is not None and found is None and inputs is not None:
        raise _refuse("the model's input", f"of type {type(inputs).__name__}", form)
    if isinstance(inputs, dict) and isinstance(form, dict):
        given = {name for name, part in inputs.items() if part is not None and (known is None or name in known)}
        if given - form.keys():
            raise _refuse("the model's input", _describe(found), form)
    _check("the model's input", found, form)
    return inputs


def _refuse(name: str, found: str, form: Form) -> ValueError:
    return ValueError(f"{name} is {found}, but the example was {_describe(form)}; give it like the example")


def _check(name: str, found: Any, form: Any) -> None:
    is_alike = type(found) is type(form)
    if is_alike and isinstance(form, dict):
        others = found.keys() - form.keys()  # of a dict, such as columns of a data set
        is_alike = form.keys() <= found.keys() and all(isinstance(key, str) for key in others)
    if not is_alike:
        raise _refuse(name, _describe(found), form)
    if isinstance(form, dict):
        for key, part in form.items():
            _check(key if isinstance(key, str) else f"input {key}", found[key], part)
    elif form is not None and len(found) != len(form):
        raise ValueError(
            f"{name} has ndim {len(found)}, but the example had ndim {len(form)}; give the same number of dimensions"
        )
    elif form is not None and any(size not in (None, own) for own, size in zip(found, form, strict=True)):
        expected = ", ".join("any number" if size is None else str(size) for size in form)
        raise ValueError(
            f"{name} has the sizes {', '.join(map(str, found))}, but the example had {expected}, and the model's code "
            "reads sizes; give inputs of the example's sizes, or name the submodules that read them, leaves=['...']"
        )


def _describe(form: Form) -> str:
    if not isinstance(form, dict):
        return "None" if form is None else "a tensor"
    return f"a dict of {', '.join(form)}" if isinstance(next(iter(form), 0), str) else f"a tuple of {len(form)}"
