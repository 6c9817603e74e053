"""Tensors that say cuda:N, hold the CPU's memory, and compute with the CPU's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch import library as operators

from tests.simulated_cuda import ledger, streams
from tests.simulated_cuda.allocator import allocate, find_block, is_known
from tests.simulated_cuda.generators import drawing_from
from tests.simulated_cuda.ledger import lock
from tests.simulated_cuda.streams import Stream, current_stream

aten = torch.ops.aten
# What returns numbers to the host waits for the device.
_HOST_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}
_VIEWS = {aten.detach.default, aten.alias.default, aten._unsafe_view.default}
_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default,
}  # fmt: skip
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_"}
_TAKE_CPU_INDICES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}
_TAKE_NO_NUMBERS = {aten.stack.default, aten.cat.default}  # of the CPU, beside tensors of a device
_FACTORIES = (
    "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "full", "scalar_tensor",
)  # fmt: skip


_NOTHING = nullcontext()
_CPU = torch.device("cpu")


class _Operation(NamedTuple):
    """What the simulation asks of one of torch's operations each time.

    Attributes:
        name: without "aten::".
        compute: what the CPU does.
        is_kernel: whether it works on the device.
        is_host_read: whether it returns numbers to the host.
        takes_lists: of tensors, perhaps of several devices.
        takes_numbers: of the CPU, beside tensors of a device.
        takes_indices: of the CPU, beside tensors of a device.
        draws: random numbers.
        written: the places and names of the arguments that it writes to.
    """

    name: str
    compute: Callable[..., Any]
    is_kernel: bool
    is_host_read: bool
    takes_lists: bool
    takes_numbers: bool
    takes_indices: bool
    draws: bool
    written: tuple[tuple[int, str], ...]


_operations: dict[int, _Operation] = {}  # by the identity of torch's operation, whose own hash takes long


def _describe(func: Any) -> _Operation:
    found = _operations.get(id(func))
    if found is None:
        found = _operations[id(func)] = _read_schema(func)
    return found


def _read_schema(func: Any) -> _Operation:
    name: str = func._schema.name.removeprefix("aten::")
    infos = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return _Operation(
        name,
        functools.partial(_multiply, func) if func in _PRODUCTS else func,
        is_kernel=not (func.is_view or func in _VIEWS or name in _NO_KERNEL),
        is_host_read=func in _HOST_READS,
        takes_lists=name.startswith("_foreach_"),
        takes_numbers=func not in _TAKE_NO_NUMBERS,
        takes_indices=func in _TAKE_CPU_INDICES,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        written=tuple((place, name) for place, (name, info) in enumerate(infos) if info is not None and info.is_write),
    )


def _multiply(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Add up products of few bits in 32 and round once, as GPUs do: old CPUs take 100 times longer for few bits."""
    dtype = args[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return func(*args, **kwargs)
    wide = [one.float() if isinstance(one, Tensor) else one for one in args]
    return _map(lambda tensor: tensor.to(dtype), func(*wide, **kwargs))


class SimulatedTensor(Tensor):
    """A tensor on a simulated GPU.

    Attributes:
        held: the CPU's tensor with its numbers.
        place: its device, which torch takes longer to tell.
    """

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=device, requires_grad=False,
        )  # fmt: skip
        made.held, made.place = held, device
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on {self.device}"

    def record_stream(self, stream: Stream) -> None:
        """Tell the allocator that a stream uses the memory."""
        with lock:
            find_block(self.held).recorded.add(stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self.detach().clone()
        copied = nn.Parameter(copied) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory with the numbers, so that torch's fully_shard can let go of it and take it again."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        streams.wait_on_host([current_stream(self.device).clock], self.device)
        return self.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default:
            return _convert(*args, **kwargs)
        if func is aten.copy_.default:
            return _copy(*args, **kwargs)
        return _launch(func, args, kwargs)


def _launch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of one device on its current stream."""
    operation = _describe(func)
    if operation.takes_lists and len({tensor.device for tensor in args[0]}) > 1:
        each = [_launch(func, [_pick(index, list_) for list_ in args], kwargs) for index in range(len(args[0]))]
        return None if each[0] is None else [result for results in each for result in results]
    leaves: list[Tensor] = []
    inner_args, inner = _unwrap(args, leaves), _unwrap(kwargs, leaves)
    tensors, device = _find_device(operation, leaves, kwargs)
    stream = current_stream(device)
    inner.pop("pin_memory", None)
    if "device" in inner:
        inner["device"] = _CPU
    compute = functools.partial(_compute, operation, device, inner_args, inner)
    if stream.capture is not None:
        return _capture(operation, stream, tensors, compute, (func, args, kwargs))
    if operation.is_host_read:
        streams.wait_on_host([stream.clock], device)
    with lock:
        number, place = None, ""
        if operation.is_kernel:
            number, place = stream.enqueue(), ledger.find_place()
            ledger.counts[f"kernels on {device}"] += 1
            written = _find_written(operation, args, kwargs)
            for tensor in tensors:
                writes = any(tensor is one for one in written)
                find_block(tensor.held).use(stream, number, operation.name, place, writes=writes)
        result = compute()
        if operation.is_host_read and not isinstance(result, Tensor):
            return result
        known = {id(tensor.held): tensor for tensor in tensors}

        def wrap(leaf: Tensor) -> Tensor:
            if (before := known.get(id(leaf))) is not None:
                return before
            block = allocate(leaf, stream)
            if number is not None:
                block.use(stream, number, operation.name, place, writes=True)
            return SimulatedTensor(leaf, device)

        wrapped = _map(wrap, result)
        if number is not None and ledger.on_kernel is not None:
            ledger.on_kernel(func, args, kwargs, _find_tensors(wrapped))
        return wrapped


def _compute(operation: _Operation, device: torch.device, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do on the CPU what a device does."""
    with drawing_from(device) if operation.draws else _NOTHING:
        return operation.compute(*args, **kwargs)


def _capture(
    operation: _Operation,
    stream: Stream,
    tensors: list[SimulatedTensor],
    compute: Callable[[], Any],
    call: tuple[Any, Any, Any],
) -> Any:
    """Let a graph get an operation, in place of the device.

    call: torch's operation and its arguments.
    """
    if operation.is_host_read:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    with lock:
        written = _find_written(operation, *call[1:])
        for tensor in written:
            stream.capture.keep(hold(tensor))
        result = compute()  # for the shapes
        known = {id(tensor.held): tensor for tensor in tensors}
        made = [one for one in _find_tensors(result) if id(one) not in known]
        for one in made:
            if not is_known(one):
                stream.capture.make(one)
            allocate(one, stream)
        wrapped = _map(lambda one: known[id(one)] if id(one) in known else SimulatedTensor(one, stream.device), result)
        if operation.is_kernel:
            again = functools.partial(_compute_into, made, compute, known)
            read, targets = [one.held for one in tensors], [*made, *map(hold, written)]
            stream.capture.add(operation.name, again, read, targets, (*call, _find_tensors(wrapped)))
        return wrapped


def _compute_into(results: list[Tensor], compute: Callable[[], Any], known: Any) -> None:
    """Do an operation of a graph again: its results are where they were."""
    found = [one for one in _find_tensors(compute()) if id(one) not in known]
    for result, one in zip(results, found, strict=True):
        result.copy_(one)


def _pick(index: int, argument: Any) -> Any:
    """Return what one tensor of a list is computed with: CUDA goes through lists with tensors of several devices."""
    return [argument[index]] if isinstance(argument, list | tuple) else argument


def _find_device(
    operation: _Operation, leaves: list[Tensor], kwargs: dict[str, Any]
) -> tuple[list[SimulatedTensor], torch.device]:
    """Return the simulated tensors among an operation's, and where it runs.

    Raises:
        RuntimeError: the tensors are on several devices.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
    if not tensors:
        return [], streams.as_device(kwargs.get("device"))
    others = [] if len(tensors) == len(leaves) else [leaf for leaf in leaves if _is_refused(operation, leaf)]
    device = tensors[0].place
    if others or any(tensor.place != device for tensor in tensors):
        found = ", ".join(sorted({str(leaf.device) for leaf in [*tensors, *others]}))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {operation.name}")
    return tensors, device


def _is_refused(operation: _Operation, leaf: Tensor) -> bool:
    """Return whether a tensor is one of the CPU that an operation does not take beside tensors of a device."""
    if isinstance(leaf, SimulatedTensor) or operation.takes_indices:
        return False
    return leaf.ndim > 0 or not operation.takes_numbers


def _find_written(operation: _Operation, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to."""
    passed = [args[place] if place < len(args) else kwargs.get(name) for place, name in operation.written]
    return _find_tensors(passed) if passed else []


def _unwrap(nest: Any, leaves: list[Tensor]) -> Any:
    """Return the arguments of an operation with the CPU's tensors, and add the tensors among them to `leaves`."""
    if isinstance(nest, Tensor):
        leaves.append(nest)
        return nest.held if isinstance(nest, SimulatedTensor) else nest
    if isinstance(nest, list | tuple):
        return type(nest)([_unwrap(child, leaves) for child in nest])
    if isinstance(nest, dict):
        return {key: _unwrap(child, leaves) for key, child in nest.items()}
    return nest


def hold(tensor: Tensor) -> Tensor:
    """Return the CPU's tensor with the numbers."""
    return tensor.held if isinstance(tensor, SimulatedTensor) else tensor


def _map(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """Replace the tensors of an operation's results, several times as fast as torch's tree_map."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, list | tuple):
        return type(nest)([_map(function, child) for child in nest])
    return nest


def _find_tensors(nest: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, in their order."""
    found: list[Tensor] = []
    stack = [nest]
    while stack:
        nest = stack.pop()
        if isinstance(nest, Tensor):
            found.append(nest)
        elif isinstance(nest, list | tuple):
            stack.extend(reversed(nest))
        elif isinstance(nest, dict):
            stack.extend(reversed(nest.values()))
    return found


def _convert(source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    """Return a copy of another type, layout or device."""
    device = source.device if device is None else torch.device(device)
    options.pop("pin_memory", None)
    made = aten._to_copy.default(hold(source), **options)
    if device.type != "cuda":
        made.zero_()
        return _copy(made, source, non_blocking)
    device = streams.as_device(device)
    with lock:
        stream = current_stream(device)
        allocate(made, stream)
        if stream.capture is not None:
            stream.capture.make(made)
        target = SimulatedTensor(made, device)
        _order_copy(target, source)
    _await_copy(target, source, non_blocking)
    return target


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy, perhaps from one device to another or to the host."""
    numbers = hold(source)
    if isinstance(target, SimulatedTensor):
        with lock:
            _order_copy(target, source)
            target.held.copy_(numbers)
        _await_copy(target, source, non_blocking)
        return target
    with lock:
        stream, number = _order_copy(target, source)
        numbers = numbers.clone()
        streams.defer(stream, number, lambda: target.copy_(numbers))
    if not (non_blocking and target.is_pinned()):
        streams.wait_on_host([stream.clock], source.device)
    return target


def _await_copy(target: SimulatedTensor, source: Tensor, non_blocking: bool) -> None:
    """Let the host wait for a copy of its own memory, unless it said that it need not."""
    if not (non_blocking or isinstance(source, SimulatedTensor)):
        streams.wait_on_host([current_stream(target.device).clock], target.device)


def _order_copy(target: Tensor, source: Tensor) -> tuple[Stream, int]:
    """Enqueue a copy as aten/src/ATen/native/cuda/Copy.cu does; return the stream that does it, and its number."""
    here = current_stream(source.device) if isinstance(source, SimulatedTensor) else None
    there = current_stream(target.device) if isinstance(target, SimulatedTensor) else None
    stream = here or there
    assert stream is not None
    between = here is not None and there is not None and source.device != target.device
    if stream.capture is not None:
        if here is not there:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        stream.capture.keep(hold(target))
        again = functools.partial(hold(target).copy_, hold(source))
        kernel = aten._to_copy.default, (source,), {}, [target]
        stream.capture.add("copy", again, [hold(source)], [hold(target)], kernel)
        return stream, 0
    if between:
        here.wait_stream(there)
    number, place = stream.enqueue(), ledger.find_place()
    if isinstance(source, SimulatedTensor):
        find_block(source.held).use(stream, number, "copy", place, writes=False)
    if isinstance(target, SimulatedTensor):
        find_block(target.held).use(stream, number, "copy", place, writes=True)
    if between:
        there.wait_stream(here)
        what = "copies between devices"
    elif here is not None and there is not None:
        what = f"kernels on {source.device}"
        if ledger.on_kernel is not None:
            ledger.on_kernel(aten._to_copy.default, (source,), {}, [target])
    else:
        what = "copies from the host" if here is None else "copies to the host"
    ledger.counts[what] += 1
    return stream, number


def register_factories() -> operators.Library:
    """Let what makes tensors on a CUDA device make simulated ones, as long as the result is kept."""
    registered = operators.Library("aten", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet), overload or "default")
        registered.impl(name, lambda *args, _func=func, **kwargs: _launch(_func, args, kwargs), "CUDA")
    registered.impl("copy_", _copy, "CUDA")  # torch.tensor(..., device=...) copies below the dispatch to Python
    return registered
