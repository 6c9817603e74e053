"""What stands for a tensor in a model's code while it is recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from gpipe.tracing.errors import Undecided

if TYPE_CHECKING:
    from gpipe.tracing.tracer import Tracer


class TracedTensor(fx.Proxy):
    """A tensor in the code of a model, or a tuple of tensors: its values are unknown, everything else is known.

    Shapes, types and devices are plain values, so the code may compute and decide with them. `batch.py` finds out which
    of them depend on the number of examples.
    """

    __array_priority__ = Tensor.__array_priority__  # numpy's numbers leave an operation to it, as to a tensor
    value: Any
    tracer: Tracer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as __dlpack__, by which C++ would read memory that does not exist
            if hasattr(type(self.value), name):
                raise self.tracer.note(Undecided(f"uses {name} of a tensor, which has no data during recording"))
            raise AttributeError(name)
        if name in _OF_GRAPH or name in _OF_RUN:
            raise self.tracer.note(Undecided(f"uses {name} of a tensor, which depends on how the model is run"))
        if isinstance(self.value, dict) and name in ("keys", "values", "items"):
            entries = {key: operator.getitem(self, key) for key in self.value}
            return getattr(entries, name)
        found = getattr(self.value, name)
        if name in ("shape", "nbytes"):
            return self.tracer.show(self.node, found)
        if isinstance(found, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if callable(found):
            return lambda *args, **kwargs: self.tracer.create_proxy("call_method", name, (self, *args), kwargs)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name):  # such as data
            raise self.tracer.note(Undecided(f"sets {name} of a tensor, which its layers would not do"))
        super().__setattr__(name, value)

    def __len__(self) -> int:
        if isinstance(self.value, dict) or (isinstance(self.value, tuple | list) and not self._is_cut):
            return len(self.value)  # of a model's own nests
        if isinstance(self.value, Tensor) and not self.value.ndim:  # C++ asks when it reads a list
            raise self.tracer.note(Undecided("takes the value out of a tensor, as torch.tensor([x]) does"))
        return int(self.tracer.show(self.node, len(self.value)))

    @property
    def _is_cut(self) -> bool:
        """Whether these are the parts of a tensor, whose number depends on one of its sizes."""
        target = self.node.target
        return (target if isinstance(target, str) else getattr(target, "__name__", "")) in _CUTS

    def __contains__(self, key: Any) -> bool:
        if isinstance(self.value, dict):
            return key in self.value
        raise self.tracer.note(Undecided("looks for a value in a tensor"))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, dict):
            return iter(self.value)
        return iter([operator.getitem(self, position) for position in range(len(self))])

    def __bool__(self) -> bool:
        if isinstance(self.value, Tensor):
            raise self.tracer.note(Undecided("decides by the values of a tensor"))
        return bool(self.value)

    def __index__(self) -> int:
        raise self.tracer.note(Undecided("uses the value of a tensor as an integer"))

    __int__ = __float__ = __index__

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", set_item, (self, key, value), {})


_CUTS = ("unbind", "split", "tensor_split", "hsplit", "vsplit", "dsplit")
_OF_GRAPH = ("requires_grad", "requires_grad_", "grad_fn", "is_leaf", "grad", "backward")
_OF_RUN = ("data_ptr", "storage", "untyped_storage", "_version", "register_hook", "retain_grad")


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[TracedTensor, Any], Any]:
    """Return a method such as __iadd__, which fx.Proxy lacks; without it, Python would make a new tensor."""

    def method(self: TracedTensor, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return method


_NAMES = ("iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ilshift", "irshift", "ifloordiv", "imod", "ipow")
IN_PLACE = {getattr(operator, name) for name in _NAMES}
for _name in _NAMES:
    setattr(TracedTensor, f"__{_name}__", _in_place(getattr(operator, _name)))


def set_item(tensor: Tensor, key: Any, value: Any) -> Tensor:
    """Change part of a tensor, and return the tensor."""
    tensor[key] = value
    return tensor
