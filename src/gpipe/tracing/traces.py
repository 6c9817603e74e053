"""A model recorded under several circumstances: what differs tells what its operations depend on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx, nn

from gpipe._compat.torch_description import tree_leaves
from gpipe.tracing.batch import BATCHES, are_equal, are_sizes_read
from gpipe.tracing.errors import TracingError, Whole, explain, explain_failure
from gpipe.tracing.inputs import find_form
from gpipe.tracing.tracer import Tracer

_FAR = 256
"""The least size to replace one of an example's, so that strides and windows do not hide the change."""


class Traces:
    """A model recorded for several numbers of examples, in training mode.

    Args:
        model: its modules are in training mode.
        example: as for `as_layers`.
        leaves: names and types of submodules that are one operation each.
        odd: submodules whose mode was not the model's.

    Attributes:
        tracers: what recorded it, for each number of examples.
        whole: the submodules that are one operation each: the leaves, and those whose code cannot be recorded.

    Raises:
        TracingError: the model's own code cannot be recorded.
    """

    def __init__(self, model: nn.Module, example: Any, leaves: Collection[Any], odd: Collection[nn.Module]) -> None:
        self._model, self._example, self._odd = model, example, odd
        self.whole: set[Any] = set(leaves)
        while True:
            self.tracers: list[Tracer] = []
            for batch in BATCHES:
                self.tracers.append(self._record(batch))
                self.whole = self.tracers[-1].whole
            if self.whole == self.tracers[0].whole:
                break

    def values(self) -> list[dict[fx.Node, Any]]:
        """Return the value, without data, of each node of the first graph, for each number of examples."""
        nodes = self.tracers[0].graph.nodes
        rows = (map(tracer.values.get, tracer.graph.nodes) for tracer in self.tracers)
        return [dict(zip(nodes, row, strict=True)) for row in rows]

    def refuse_decision(self) -> None:
        """Refuse a model whose own code decides by `training`, unless it runs the same operations in both modes."""
        decision = self.tracers[0].decision
        if decision is not None and not are_equal(self.tracers[0], self._record(training=False)):
            raise explain(self._model, decision, "decides by self.training")

    def refuse_sizes(self) -> None:
        """Refuse a model whose code reads a size that depends on values, such as the length of the longest text."""
        if not self.tracers[0].has_run:
            return
        try:
            other = self._record(number=2)
        except TracingError:
            return  # such as for an index beyond a table
        if other.whole == self.whole and not self._is_same(other):
            raise explain(self._model, [], "reads a size of what a submodule returns, which depends on values")

    def find_read(self) -> set[int]:
        """Return the sizes of the example that the model's code reads: replacing one changes what is recorded."""

        def is_read(size: int) -> bool:
            try:
                other = self._record(sizes={size: max(2, -(-_FAR // size)) * size})
            except TracingError:
                return True
            return other.whole != self.whole or not self._is_same(other)

        sizes = tree_leaves(find_form(self._example, 0)) if are_sizes_read(self.tracers) else ()
        return {size for size in {*sizes} if size and is_read(size)}

    def _record(self, batch: int = BATCHES[0], **modes: Any) -> Tracer:
        """Record the operations on `batch` examples; what is found to be one operation each is among `whole` there."""
        whole = set(self.whole)
        while True:
            tracer = Tracer(whole, batch, odd=self._odd, **modes)
            try:
                tracer.record(self._model, self._example)
                return tracer
            except Whole as found:
                whole.add(type(found.module))
            except TracingError:
                raise
            except Exception as error:
                raise explain_failure(self._model, error, batch) from error

    def _is_same(self, other: Tracer) -> bool:
        return other.sizes_read() == self.tracers[0].sizes_read() and are_equal(self.tracers[0], other)
