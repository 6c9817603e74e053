"""Where to cut the recorded operations of a model into layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate

from torch import Tensor, fx

from gpipe.tracing.operations import Operations
from gpipe.tracing.tracer import storage_of

# A layer costs about ten microseconds, so none gets less than 1/256 of the model's FLOPs, and a piece of less than 1/64
# is not cut. A cut that several tensors cross is only worth it in a piece of more than 1/16.
_LEAST, _SMALL, _LARGE = 1 / 256, 1 / 64, 1 / 16


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
