"""The recorded operations of a model in order, what is alive between them, and where to cut them into layers."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, fx, nn

from gpipe._compat.torch_description import tree_leaves
from gpipe.pipeline._compat import AnyBatchNorm
from gpipe.tracing.batch import BATCHES, Constant, Numbering, OfBatch
from gpipe.tracing.tracer import storage_of

# A layer costs about ten microseconds, so none gets less than 1/256 of the model's FLOPs, and a piece of less than 1/64
# is not cut. A cut that several tensors cross is only worth it in a piece of more than 1/16.
_LEAST, _SMALL, _LARGE = 1 / 256, 1 / 64, 1 / 16


class Operations:
    """The operations of a model in order, and what is alive between them.

    Args:
        model: whose operations these are.
        graph: the operations, recorded with the first number of examples.
        arguments: the args and kwargs of each operation and the output, for any number of examples.
        constants: tensors that the model's code made from no input, by name.
        values: each node's value, without data, for each number of examples.
        moving: the identities of the model's buffers that its code changes.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        arguments: Mapping[fx.Node, tuple[Any, Any]],
        constants: Mapping[str, Constant | Numbering],
        values: Sequence[Mapping[fx.Node, Any]],
        moving: Collection[int],
    ) -> None:
        self.model, self.arguments, self.values = model, arguments, values
        self.constants, self._moving = constants, moving
        self.nodes = [node for node in graph.nodes if node.op.startswith("call_")]
        (self.inputs,) = (node for node in graph.nodes if node.op == "placeholder")
        (self.output,) = (node for node in graph.nodes if node.op == "output")
        last_use: dict[fx.Node, int] = {}
        for position, node in enumerate([*self.nodes, self.output]):
            for used in node.all_input_nodes:
                last_use[used] = position
        self._last_use = last_use

    def states(self, node: fx.Node) -> list[Hashable]:
        """Return what an operation uses that one layer must have: batch norms, and buffers that the code changes."""
        names = [str(used.target).removeprefix("model.") for used in node.all_input_nodes if used.op == "get_attr"]
        used = [self.attribute(name)[0] for name in names if name not in self.constants and name != "training"]
        norms: list[Hashable] = []
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target).removeprefix("model."))
            norms += [child for child in module.modules() if isinstance(child, AnyBatchNorm)]
            used += module.buffers()
        return norms + [id(own) for own in used if id(own) in self._moving]

    def find_alive(self, cut: int) -> list[fx.Node]:
        """Return the nodes before a cut that operations after it need."""
        made = [self.inputs, *self.nodes[:cut]]
        return [node for node in made if self._last_use.get(node, -1) >= cut]

    def needs_batch_size(self, node: fx.Node) -> bool:
        """Return whether an operation needs the number of examples."""
        constants = (self.constants.get(str(used.target).removeprefix("model.")) for used in node.all_input_nodes)
        shapes = [constant.shape for constant in constants if constant is not None]
        return any(isinstance(leaf, OfBatch) for leaf in tree_leaves((*self.arguments[node], shapes)))

    def find_examples(self, node: fx.Node) -> tuple[int, int] | None:
        """Return what the function `find_examples` does, of the tensor that a node returns."""
        return find_examples([values[node] for values in self.values])

    def counts_rows(self, begin: int, end: int) -> bool:
        """Return whether the operations between two cuts know the number of examples only from a multiple of it."""
        found = map(self.find_examples, self.find_alive(begin))
        needs = any(map(self.needs_batch_size, self.nodes[begin:end]))
        return needs and all(one is None or one[1] != 1 for one in found)

    def attribute(self, name: str) -> tuple[Any, bool]:
        """Return a submodule, parameter or buffer of the model, and whether it is a buffer that is not saved."""
        parent, _, own = name.rpartition(".")
        module = self.model.get_submodule(parent)
        return getattr(module, own), own in module._non_persistent_buffers_set


def find_examples(values: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return a tensor's dimension with the examples, and the number of its entries per example; None if there is none.

    values: the tensor for each number of examples.
    """
    for dimension, sizes in enumerate(zip(*(value.shape for value in values), strict=True)):
        factor, rest = divmod(sizes[0], BATCHES[0])
        if rest == 0 and factor and all(size == factor * n for size, n in zip(sizes, BATCHES, strict=True)):
            return dimension, factor
    return None


def choose_cuts(operations: Operations, flops: Mapping[fx.Node, int], changed: Mapping[fx.Node, set[int]]) -> list[int]:
    """Return the positions among the operations at which layers begin, except the first.

    A piece is cut in two where the fewest bytes are alive; among places with about as few, where the fewest tensors
    are, then nearest the middle of its FLOPs. No cut lies between two uses of a batch norm, or of a buffer that the
    model's code changes: it belongs to one layer.
    """
    nodes = operations.nodes
    uses: dict[Hashable, list[int]] = {}
    for position, node in enumerate([*nodes, operations.output]):
        for state in operations.states(node):
            uses.setdefault(state, []).append(position)
    together = {cut for positions in uses.values() for cut in range(positions[0] + 1, positions[-1] + 1)}
    work = [0, *accumulate(flops.get(node, 0) + 1 for node in nodes)]
    total = work[-1]
    crossing: dict[int, tuple[int, int]] = {}  # cut -> bytes, number of tensors
    later: set[int] = set()
    is_size_needed = False  # whether an operation after the cut needs the number of examples
    for cut in range(len(nodes) - 1, 0, -1):
        later |= changed.get(nodes[cut], set())
        is_size_needed = is_size_needed or operations.needs_batch_size(nodes[cut])
        alive = operations.find_alive(cut)
        tensors = [operations.values[0][node] for node in alive]
        travels = all(isinstance(tensor, Tensor) and storage_of(tensor) not in later for tensor in tensors)
        if travels and cut not in together and (not is_size_needed or any(map(operations.find_examples, alive))):
            crossing[cut] = sum(tensor.nbytes for tensor in tensors), len(tensors)
    cuts: list[int] = []
    pieces = [(0, len(nodes))]
    while pieces:
        begin, end = pieces.pop()
        own = work[end] - work[begin]
        if own <= _SMALL * total:
            continue
        possible = [
            cut
            for cut in range(begin + 1, end)
            if cut in crossing
            and min(work[cut] - work[begin], work[end] - work[cut]) >= _LEAST * total
            and (crossing[cut][1] == 1 or own > _LARGE * total)
        ]
        if not possible:
            continue
        least = min(crossing[cut][0] for cut in possible)
        near = [cut for cut in possible if crossing[cut][0] <= 1.25 * least]
        best = min(near, key=lambda cut: (crossing[cut][1], abs(work[cut] - (work[begin] + work[end]) / 2)))
        cuts.append(best)
        pieces += [(begin, best), (best, end)]
    return sorted(cuts)
