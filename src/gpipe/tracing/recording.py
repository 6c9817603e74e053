"""Patch torch and Python while a model's code is recorded."""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpipe._compat.torch_description import list_device_constructors
from gpipe.tracing.errors import Undecided, is_of_model
from gpipe.tracing.traced_shape import TracedShape
from gpipe.tracing.traced_tensor import TracedTensor

if TYPE_CHECKING:
    from gpipe.tracing.tracer import Tracer


class TracedMode:
    """`module.training` in a model's code; as an argument, it is read again each time the layer runs."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __bool__(self) -> bool:
        return self.tracer.decide()

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))


_CONTEXT_QUERIES = (
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "is_autocast_cache_enabled",
    "get_autocast_dtype",
    "get_autocast_cpu_dtype",
    "get_autocast_gpu_dtype",
)
"""Functions of torch that tell in which contexts code runs: a pipeline's contexts are not those of the recording."""

_SEEDS = (torch, "manual_seed"), (torch, "set_rng_state"), (torch.random, "manual_seed"), (torch.random, "fork_rng")
"""Functions that change the generator, whose numbers layers draw when they run."""

_LISTS = "parameters", "named_parameters", "buffers", "named_buffers"
"""Methods of modules by which code reaches tensors other than by name."""

_CONVERSIONS = "tensor", "as_tensor", "asarray"
"""Functions of torch that read the memory or the items of their argument, unless it is a tensor."""


def _list_refusals(tracer: Tracer) -> list[tuple[Any, str, Any]]:
    """Return what refuses to do what a layer would do differently, each with the owner and name that it replaces.

    That is custom backwards, autocast, seeds, and decisions by context.
    """
    apply, enter = torch.autograd.Function.__dict__["apply"], torch.autocast.__enter__

    def apply_traced(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.is_recording and any(type(leaf) is TracedTensor for leaf in args):
            raise tracer.note(
                Undecided(f"calls {cls.__name__}.apply, whose own backward would be lost; call it in a submodule")
            )
        return apply.__func__(cls, *args, **kwargs)

    def enter_traced(context: torch.autocast) -> Any:
        if tracer.is_recording:
            raise tracer.note(Undecided("enters torch.autocast, which its layers would not do"))
        return enter(context)  # type: ignore[no-untyped-call]

    def refuse(name: str, function: Callable[..., Any], why: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            # Torch's own code calls them too, such as to choose between ways to compute the same.
            if tracer.is_recording and is_of_model(sys._getframe(1).f_code.co_filename):
                raise tracer.note(Undecided(f"calls torch.{name}, which {why}"))
            return function(*args, **kwargs)

        return refused

    queries = [(torch, name, "depends on how the model is run") for name in _CONTEXT_QUERIES]
    seeds = [(owner, name, "its layers would not do") for owner, name in _SEEDS]
    return [
        *((owner, name, refuse(name, getattr(owner, name), why)) for owner, name, why in queries + seeds),
        (torch.autograd.Function, "apply", classmethod(apply_traced)),
        (torch.autocast, "__enter__", enter_traced),
    ]


def _list_conversions(tracer: Tracer) -> list[tuple[Any, str, Any]]:
    """Return what handles traced values, each with the owner and name that it replaces.

    In the model's code, `isinstance` sees the values behind traced tensors, and lists of parameters are traced. Neither
    holds in torch's own code, some of which is C++.
    """
    check = builtins.isinstance

    def check_traced(value: Any, kinds: Any) -> bool:
        if type(value) in (TracedTensor, TracedShape) and is_of_model(sys._getframe(1).f_code.co_filename):
            return check(value.value if type(value) is TracedTensor else value.whole(), kinds)
        return check(value, kinds)

    def is_tensor(value: Any) -> bool:
        is_traced = type(value) is TracedTensor and is_of_model(sys._getframe(1).f_code.co_filename)
        return check(value.value if is_traced else value, Tensor)

    def write_training(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    def convert(function: Callable[..., Any]) -> Callable[..., Any]:
        def converted(*args: Any, **kwargs: Any) -> Any:
            named = [name for name in ("data", "obj") if name in kwargs]
            args = (*(kwargs.pop(name) for name in named), *args)
            if args and type(args[0]) is TracedTensor:
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*(one.whole() if type(one) is TracedShape else one for one in args), **kwargs)

        return converted

    def list_traced(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def trace(one: Any) -> Any:
            return (one[0], trace(one[1])) if type(one) is tuple else tracer.getattr("", one, {})

        def listed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            is_traced = tracer.is_recording and is_of_model(sys._getframe(1).f_code.co_filename)
            return map(trace, function(*args, **kwargs)) if is_traced else function(*args, **kwargs)

        return listed

    return [
        *((torch, name, convert(getattr(torch, name))) for name in _CONVERSIONS),
        *((nn.Module, name, list_traced(getattr(nn.Module, name))) for name in _LISTS),
        (nn.Module, "training", property(tracer.read_training, write_training)),
        (torch, "is_tensor", is_tensor),
        (builtins, "isinstance", check_traced),
    ]


@contextmanager
def patch_torch(tracer: Tracer) -> Iterator[None]:
    """Notice and refuse what a model's code asks torch and Python for."""
    list_device_constructors()  # torch caches those that it finds first, for good
    replaced = _list_refusals(tracer) + _list_conversions(tracer)
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in replaced]
    for owner, name, attribute in replaced:
        setattr(owner, name, attribute)
    try:
        yield
    finally:
        for owner, name, attribute in reversed(before):
            if attribute is None:  # modules have `training`, and their class does not
                delattr(owner, name)
            else:
                setattr(owner, name, attribute)


def read_settings() -> tuple[Any, ...]:
    """Return settings of torch by which it chooses how to compute, and that the model's code may change."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    convolution = cudnn.enabled, cudnn.deterministic, cudnn.benchmark
    precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    return attention, cuda.cudnn_sdp_enabled(), convolution, precision


def find_line(
    model: nn.Module, run: Callable[[], Any], has_happened: Callable[[], bool]
) -> traceback.FrameSummary | None:
    """Run a model's code again; return the line of its modules' forwards at which something happens, or None."""
    codes = [getattr(unwrap(type(module).forward), "__code__", None) for module in model.modules()]
    files = {code.co_filename for code in codes if code is not None and is_of_model(code.co_filename)}
    at: traceback.FrameSummary | None = None
    found: traceback.FrameSummary | None = None

    def look(frame: FrameType, *_: Any) -> Any:
        nonlocal at, found
        if frame.f_code.co_filename not in files:
            return None
        if found is None and at is not None and has_happened():
            found = at
        at = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    except Exception:  # noqa: BLE001 - it may have happened before
        return found
    finally:
        sys.settrace(before)
    return found
