"""Fast tensors without data: the result of a repeated operation is looked up.

torch's mode caches operations too. But its key, made for symbolic shapes, several devices and tensors of all kinds,
costs more than the rest of an operation on such tensors. Here, unusual operations are left to torch.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (  # noqa: TID251
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn import Parameter

_LOG = logging.getLogger(FakeTensorMode.__module__)
_DEVICE = torch.ops.prim.device.default  # C++ asks it during each operation
_VIEWS = frozenset(  # torch's mode makes these in the same way, after a search
    (
        torch.ops.aten.as_strided.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.squeeze.dims,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.view.default,
    )
)
_LIFTING = frozenset(
    (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
)  # results may hold a constant
_REFORMING = torch.Tag.inplace_view  # changes the shape or the memory of its argument
_Key: TypeAlias = tuple[Any, ...]


def is_fake(value: object) -> bool:
    """Return whether a value is one of torch's tensors without data."""
    return isinstance(value, FakeTensor)


class _Shape(NamedTuple):
    """A tensor that an operation returns in its own memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, mode: FakeTensorMode) -> FakeTensor:
        with in_kernel_invocation_manager(mode):
            found = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, found, self.device)


_FIRST: Final = "the first argument"  # is what an operation returns
_Known: TypeAlias = _Shape | tuple[_Shape | None, ...] | Literal["the first argument"]


class QuickFakeTensorMode(FakeTensorMode):
    """torch's FakeTensorMode with the same results, but faster for repeated operations.

    allow_non_fake_inputs: accept tensors with data too, and use only their shapes.
    """

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._known: dict[_Key, _Known] = {}  # of operations with their arguments

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip torch's wrapper against torch.compile, which never sees this mode."""
        return False

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return an operation's result, without data."""
        if func is _DEVICE and not self.in_kernel_invocation:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func in _VIEWS and type(args[0]) is FakeTensor and args[0].constant is None:
            with in_kernel_invocation_manager(self):
                view = func(*args, **kwargs)
            return FakeTensor(self, view, args[0].fake_device)
        if self.allow_non_fake_inputs and not func.is_view and func not in _LIFTING and _REFORMING not in func.tags:
            args, kwargs = tuple(map(self._describe, args)), {key: self._describe(kwargs[key]) for key in kwargs}
        key = None if func.is_view else _make_key(func, args, kwargs)
        if key is None:
            return self._dispatch(func, types, args, kwargs)
        known = self._known.get(key)
        if known is None:
            before = dict(_find_storages((args, tuple(kwargs.values()))))
            result = self._dispatch(func, types, args, kwargs)
            if result is args[0]:
                after = dict(_find_storages((args, tuple(kwargs.values()))))
                known = _FIRST if before == after and key == _make_key(func, args, kwargs) else None
            else:
                known = _find_shapes(result, before)
            if known is None:
                return result
            self._known[key] = known
        # The first result is made anew too: torch holds its own for a while, which would make autograd copy a gradient.
        if isinstance(known, str):
            return args[0]
        if isinstance(known, _Shape):
            return known.make(self)
        return tuple(None if shape is None else shape.make(self) for shape in known)

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let torch's mode run an operation, without the twenty log lines if it fails: the error is enough."""
        before, _LOG.disabled = _LOG.disabled, True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            _LOG.disabled = before

    def _describe(self, value: Any) -> Any:
        """Replace a tensor with data, or those in a list, by tensors without; the same tensor gives the same one."""
        if type(value) in (Tensor, Parameter):
            return self.from_tensor(value)
        return list(map(self._describe, value)) if type(value) is list else value


def _make_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key | None:
    """Return everything that an operation's result depends on; None if it may depend on something else."""
    if not args:
        return None
    parts = [func, torch.get_default_dtype()]
    for value in (*args, *kwargs.items()):
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                return None
            parts.append((value.shape, value.stride(), value.dtype, value.fake_device))
        elif kind is list or kind is tuple:
            if (inner := _make_key(kind, tuple(value), {})) is None and value:
                return None
            parts.append(inner)
        elif kind.__hash__ is None or isinstance(value, Tensor):
            return None
        else:
            parts.append((kind, value))  # 1, 1.0 and True are equal
    return tuple(parts)


def _find_storages(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield the id and the bytes of each storage in a nest."""
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()._cdata, value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            yield from _find_storages(value)


def _find_shapes(result: Any, storages: Container[int]) -> _Shape | tuple[_Shape | None, ...] | None:
    """Return the shapes of a result whose tensors share memory with nothing and fill it; None for any other result."""
    if isinstance(result, tuple):
        shapes = tuple(None if one is None else _find_shapes(one, storages) for one in result)
        is_known = all(one is None or isinstance(shape, _Shape) for one, shape in zip(result, shapes, strict=True))
        return cast(tuple[_Shape | None, ...], shapes) if is_known else None
    if type(result) is not FakeTensor or result.layout is not torch.strided:
        return None
    shape = _Shape(result.shape, result.stride(), result.dtype, result.fake_device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape.size, shape.stride, strict=True))
    needed = reach * result.itemsize if result.numel() else 0
    storage = result.untyped_storage()
    return shape if storage.nbytes() == needed and storage._cdata not in storages else None
