"""The buffers of layers, such as moving averages: only the forward of a micro-batch changes them.

    forward of each micro-batch      starts where the one before ended; what it changes is copied first
    recomputation, inner checkpoint  starts where the forward of its micro-batch started, and changes nothing for good

Batch norms are handled in `pipeline/batch_norm.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from gpipe.pipeline._compat import noting_averages
from gpipe.pipeline.batch_norm import MicroBatchNorm
from gpipe.pipeline.microbatch import Payload
from gpipe.pipeline.nothing import NOTHING

BufferPlace: TypeAlias = tuple[int, str]
"""Where a buffer is: the identity of its module, and its name there."""

BufferCopies: TypeAlias = dict[BufferPlace, Tensor | None]
"""Copies of buffers; None where there was no buffer."""


_NO_COPIES: AbstractContextManager[BufferCopies] = nullcontext({})


class Buffers:
    """The buffers of some layers, by their index in the model, except those of converted batch norms.

    In the first micro-batch of a step all are copied, to see which ones a forward changes. Later only those are:
    constants, such as masks, cost nothing.
    """

    def __init__(self, layers: Mapping[int, nn.Module], shared: Collection[str]) -> None:
        self._layers, self._shared = layers, shared
        self._modules: dict[int, nn.Module] = {}  # by identity: those with buffers; in the first forward ever, all
        self._places: list[BufferPlace] = []
        self._made: list[BufferPlace] = []  # of the buffers that the step's first forward has created
        self._start: BufferCopies | None = None  # of those that forwards change; None before a step's first one
        self._silent: set[BufferPlace] | None = None  # those that layers change through `.data`, which leaves no trace
        self._memory: set[int] = set()
        self._changed: set[int] = set()  # the modules, by identity, that have ever changed a buffer

    def start_step(self, modules: Iterable[nn.Module]) -> None:
        """Begin a training step with the buffers that all modules of the layers have now."""
        self._start, self._made, is_first = None, [], self._silent is None
        self._modules = {id(m): m for m in modules if (m._buffers or is_first) and not isinstance(m, MicroBatchNorm)}
        # By `items`: the buffers of a TorchScript module are not a dict.
        self._places = [(owner, name) for owner, module in self._modules.items() for name, _ in module._buffers.items()]
        self.find_memory(self._modules.values())

    def find_memory(self, modules: Iterable[nn.Module]) -> None:
        """Note where the buffers of the modules that will run lie; converted batch norms never return one."""
        own = (m._buffers.values() for m in modules if m._buffers and not isinstance(m, MicroBatchNorm))
        self._memory = {place for of_one in own for buffer in of_one if (place := _find_place(buffer)) is not None}

    def copy_out(self, payload: Payload) -> Payload:
        """Return a payload with copies of tensors that lie in buffers, which the next forward may change in place."""
        if not self._memory or all(payload.differentiable):
            return payload
        tensors = [tensor.clone() if _find_place(tensor) in self._memory else tensor for tensor in payload.tensors]
        return payload.replace(tensors)

    def moved(self, *, for_recomputation: bool) -> AbstractContextManager[BufferCopies]:
        """Let a forward in the body change buffers; give what it found in them, complete once the body has ended.

        After an error in the body they are restored.

        Raises:
            ValueError: a buffer changed that did not change in the step's first micro-batch. Its earlier value is
                unknown, so the forward cannot be recomputed. Or one changed that another layer has too.
        """
        is_needed = self._places or self._made or self._silent is None
        return self._moved(for_recomputation=for_recomputation) if is_needed else _NO_COPIES

    @contextmanager
    def _moved(self, *, for_recomputation: bool) -> Iterator[BufferCopies]:
        is_first = self._start is None
        before = self._current([*self._places, *self._made])
        versions = {place: buffer._version for place, buffer in before.items()}
        snapshot = _copy(before if self._start is None else {place: before.get(place) for place in self._start})
        try:
            with noting_averages() as averages:
                yield snapshot
        except BaseException:
            self._restore({**snapshot, **self._find_made(before)} if is_first else snapshot)
            raise
        written = set(map(_find_place, averages)) - {None}
        changed = {
            place
            for place, buffer in self._current(self._places).items()
            if buffer is not before.get(place)
            or buffer._version != versions[place]
            or (written and _find_place(buffer) in written)
        }
        if is_first:
            if self._silent is None:  # compared only once: on a GPU it waits once per buffer
                current = self._current(snapshot.keys() - changed)
                earlier = ((place, buffer, snapshot[place]) for place, buffer in current.items())
                self._silent = {p for p, buffer, old in earlier if old is None or not torch.equal(buffer, old)}
            for place in snapshot.keys() - changed - self._silent:
                del snapshot[place]
            made = self._find_made(before)
            snapshot |= made
            self._made = [place for place in made if place not in self._places]
            if shared := [name for name in map(self._name, snapshot if self._shared else ()) if name in self._shared]:
                self._restore(snapshot)
                raise ValueError(
                    f"a forward changed the buffer {shared[0]}, which another layer has too and would not see changed "
                    "in another stage; give each layer its own buffer"
                )
            self._start = snapshot
            self._changed.update(owner for owner, _ in snapshot)
        elif late := changed - snapshot.keys():
            self._silent = (self._silent or set()) | late  # copied from the next step on, however they change
            if not for_recomputation:
                return
            raise ValueError(
                f"the buffer {min(map(self._name, late))} changed in this micro-batch, but not in the step's first "
                "one; let it change in all micro-batches or in none, or set rematerialize='never'"
            )

    def _find_made(self, before: Mapping[BufferPlace, Tensor]) -> BufferCopies:
        """Return None for each buffer that the first forward of a step has created."""
        return {
            (owner, name): None
            for owner, module in self._modules.items()
            if not isinstance(module, LazyModuleMixin)  # these fill in buffers that they already list
            for name, buffer in module._buffers.items()
            if buffer is not None and (owner, name) not in before
        }

    def replaced(self, snapshot: BufferCopies) -> AbstractContextManager[None]:
        """Let the body, which runs a forward again, read and change copies of a snapshot in place of the buffers."""
        return self._replaced(snapshot) if snapshot else NOTHING

    @contextmanager
    def _replaced(self, snapshot: BufferCopies) -> Iterator[None]:
        current = self._current(snapshot)
        before = {place: current.get(place) for place in snapshot}
        self._put(_copy(snapshot))
        try:
            yield
        finally:
            self._put(before)

    def has_changed(self, layer: nn.Module) -> bool:
        """Return whether a forward of a layer has changed its buffers, in the first micro-batch of any step so far."""
        return bool(self._changed) and any(id(module) in self._changed for module in layer.modules())

    def undo_step(self) -> None:
        """Restore the buffers to what they were when the step began.

        A buffer that changed for the first time ever, and not in the step's first micro-batch, stays as it is.
        """
        self._restore(self._start or {})

    def finish_step(self) -> None:
        """Release the copies of the buffers."""
        self._start = None

    def _current(self, places: Iterable[BufferPlace]) -> dict[BufferPlace, Tensor]:
        named = ((owner, name, self._modules[owner]._buffers) for owner, name in places)
        found = {(owner, name): buffers[name] for owner, name, buffers in named if name in buffers}
        return {place: buffer for place, buffer in found.items() if buffer is not None and not is_lazy(buffer)}

    def _put(self, values: Mapping[BufferPlace, Tensor | None]) -> None:
        for (owner, name), value in values.items():
            self._modules[owner]._buffers[name] = value
            if value is None and (owner, name) not in self._places:
                del self._modules[owner]._buffers[name]

    def _name(self, place: BufferPlace) -> str:
        """Return the name of a buffer in the whole model."""
        named = (pair for i, layer in self._layers.items() for pair in layer.named_modules(prefix=f"layers.{i}"))
        return next(f"{path}.{place[1]}" for path, module in named if id(module) == place[0])

    @torch.no_grad()
    def _restore(self, snapshot: BufferCopies) -> None:
        current = self._current(snapshot)
        for place, value in snapshot.items():
            if value is not None and place in current and current[place].shape == value.shape:
                current[place].copy_(value)
            else:
                self._put({place: value})


def _find_place(tensor: Tensor | None) -> int | None:
    """Return where a tensor's memory begins; None if it has no plain memory, such as a sparse or distributed one."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage().data_ptr()


def find_shared_buffers(layers: nn.Sequential) -> set[str]:
    """Return the names in the whole model of buffers that several layers have."""
    found: dict[int, dict[int, list[str]]] = {}
    for index, layer in enumerate(layers):
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            found.setdefault(id(buffer), {}).setdefault(index, []).append(f"layers.{index}.{name}")
    return {name for of in found.values() if len(of) > 1 for names in of.values() for name in names}


def _copy(buffers: Mapping[BufferPlace, Tensor | None]) -> BufferCopies:
    """Copy buffers; one buffer in two places stays one."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values() if buffer is not None}
    return {place: copies.get(id(buffer)) for place, buffer in buffers.items()}
