"""The private interfaces of torch that the engine calls; they are the same in torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # noqa: TID251
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, _engine_run_backward  # noqa: TID251
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _set_pg_timeout  # noqa: TID251
from torch.nn.modules import batchnorm

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


# The base class of all batch norms.
AnyBatchNorm = batchnorm._BatchNorm  # noqa: TID251

# Changes the time-out of a group, which is made with a short one, so that a missing process is noticed.
set_timeout = _set_pg_timeout

# One kernel for many tensors, as torch's optimisers use them.
add_to_each = torch._foreach_add_  # noqa: TID251
copy_to_each = torch._foreach_copy_  # noqa: TID251
multiply_each = torch._foreach_mul_  # noqa: TID251
norm_of_each = torch._foreach_norm  # noqa: TID251


_torch_batch_norm = torch.batch_norm
_averages: dict[int, list[Tensor | None]] = {}  # by thread
_lock = Lock()


def _batch_norm(
    input: Tensor,  # noqa: A002 - the name that torch gave it
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if training and not torch.compiler.is_compiling():
        for average in (running_mean, running_var):
            while average is not None and is_functorch_wrapped_tensor(average):
                average = get_unwrapped(average)
            _averages.get(get_ident(), []).append(average)
    return _torch_batch_norm(input, weight, bias, running_mean, running_var, training, *args, **kwargs)


@contextmanager
def noting_averages() -> Iterator[list[Tensor | None]]:
    """Collect the moving averages that `F.batch_norm` writes in the body, on this thread.

    Their versions do not change, and torch has no hook for them. So what `F.batch_norm` calls is replaced meanwhile.
    """
    found: list[Tensor | None] = []
    with _lock:
        _averages[get_ident()] = found
        torch.batch_norm = _batch_norm
    try:
        yield found
    finally:
        with _lock:
            del _averages[get_ident()]
            if not _averages:
                torch.batch_norm = _torch_batch_norm


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what torch.compile returns, or was compiled in place."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor] | None = None
) -> None:
    """Run a backward as `torch.autograd.backward` does, from gradients that fit their roots.

    Torch's function first compares their shapes in Python, which takes a twelfth of a micro-batch's time on a stage of
    one small layer. It is called only where a scalar has no gradient yet: it makes one.

    Args:
        roots: where it starts.
        gradients: of the roots.
        inputs: the leaves that get gradients, at least one; None: all.
    """
    if any(gradient is None for gradient in gradients):
        torch.autograd.backward(roots, gradients, inputs=inputs)
        return
    assert inputs is None or inputs, "none at all would mean all"
    # Do not keep the graph, nor make one of the backward; allow inputs that are not reached; add up gradients.
    _engine_run_backward(tuple(roots), tuple(gradients), False, False, tuple(inputs or ()), True, True)


def apply_function(function: type[Function], *arguments: Any) -> Any:
    """Apply an autograd function, outside torch.func's transforms, for which torch's own `apply` checks first."""
    return super(Function, function).apply(*arguments)  # type: ignore[misc]


def open_store() -> Store:
    """Return the job's key-value store, with separate keys for each pipeline that the job makes.

    Torch offers the store that a job was started with under a private name only; a second store would need a port. The
    clone has its own connection: while a group is made, torch waits for others in the default one.
    """
    store: Store = _get_default_store().clone()  # type: ignore[attr-defined]  # the stub lacks it
    number = store.add(f"gpipe/pipelines of {dist.get_rank()}", 1)  # all processes make them in the same order
    return PrefixStore(f"gpipe/{number}", store)


def surround_collectives(module: FSDPModule, surrounding: Callable[[], AbstractContextManager[None]]) -> None:
    """Run each collective of a module that fully_shard has changed within a context.

    Torch lets users replace the collectives, but its own, which are called here, have private names.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter  # noqa: TID251

    class AllGather(DefaultAllGather):
        def __call__(self, *args: Any, **options: Any) -> dist.Work | None:
            with surrounding():
                return super().__call__(*args, **options)

    class ReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **options: Any) -> dist.Work:
            with surrounding():
                return super().__call__(*args, **options)

    module.set_custom_all_gather(AllGather())
    module.set_custom_reduce_scatter(ReduceScatter())


# Torch's own limit is 8. A forward, a recomputation and an evaluation are variants of each other, and so are the sizes
# of micro-batches of whole and of last mini-batches.
_MOST_VARIANTS = 32


class TooManyVariants(RuntimeError):
    """A layer would have to be compiled in more variants than are allowed."""

    def __init__(self) -> None:
        super().__init__(
            f"this layer has been compiled in {_MOST_VARIANTS} variants, the limit, and needs another one: give its "
            "inputs fewer shapes, do not change its attributes (such as the rate of drop-path) from step to step, or "
            "do not compile (trainer.compile=false)"
        )


@contextmanager
def noting_compilation(note: Callable[[bool], None]) -> Iterator[None]:
    """Call `note(True)` when torch.compile begins to compile in the body, and `note(False)` when it has finished.

    Torch has no public callback for that. Compilation here also has settings that no argument offers:

    - A layer's backward is compiled together with its forward, not within the first backward.
    - Random numbers are those of the plain layer. Inductor's own depend on the graph that it makes of the layer, so a
      forward without a graph, its recomputation and an uncompiled layer would have different masks.
    - A layer that needs too many variants is an error (`TooManyVariants`). Torch would silently run it uncompiled from
      then on.
    """
    from torch._dynamo import config as dynamo  # noqa: TID251 - loads torch.compile's machinery
    from torch._dynamo.callback import CallbackArgs, callback_handler  # noqa: TID251
    from torch._dynamo.exc import FailOnRecompileLimitHit  # noqa: TID251
    from torch._functorch import config  # noqa: TID251
    from torch._inductor import config as inductor  # noqa: TID251

    def begin(_: CallbackArgs) -> None:
        note(True)

    def end(_: CallbackArgs) -> None:
        note(False)

    with (
        config.patch(force_non_lazy_backward_lowering=True),
        inductor.patch(fallback_random=True),
        dynamo.patch(fail_on_recompile_limit_hit=True, recompile_limit=_MOST_VARIANTS),
    ):
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        except FailOnRecompileLimitHit:
            raise TooManyVariants from None
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
