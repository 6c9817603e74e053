"""Cut L layers into K partitions of consecutive layers: exact optima, none empty, optionally under a memory limit."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Literal, SupportsFloat

CutObjective = Literal["max", "variance"]


def partition_layers(
    costs: Sequence[float],
    num_partitions: int,
    *,
    objective: CutObjective = "max",
    memory_bytes: Sequence[int] | None = None,
    memory_limit_bytes: int | None = None,
) -> list[int]:
    """Choose how many consecutive layers each partition gets.

    `objective="max"` minimises the cost of the most expensive partition, which bounds the throughput of a pipeline,
    and takes the smallest variance among equals. `objective="variance"` minimises the variance of the K summed costs,
    the paper's rule (section 2). Both are exact: costs become integers of any size, and nothing is rounded. Remaining
    ties give the last partition the most layers, then the one before it. If every cost is zero, layers count as equally
    expensive.

    Args:
        costs: L costs >= 0 in any unit (FLOPs, bytes, seconds), one per layer.
        num_partitions: K, from 1 to L.
        objective: "max" or "variance".
        memory_bytes: bytes that each layer needs; only with `memory_limit_bytes`.
        memory_limit_bytes: the most bytes that the layers of one partition may need together.

    Returns:
        K numbers of layers, each at least 1, with the sum L.

    Raises:
        ValueError: an invalid argument, or a memory limit that no cut satisfies; the message names the bound.
    """
    _check_counts(costs, num_partitions, objective)
    num_layers = len(costs)
    prefix = list(accumulate(_exact_integers(costs), initial=0))
    if prefix[-1] == 0:
        prefix = list(range(num_layers + 1))
    memory_ends = [num_layers] * num_layers
    if memory_bytes is not None and memory_limit_bytes is not None:
        _check_memory(memory_bytes, memory_limit_bytes, num_layers)
        memory_ends = _furthest_ends(list(accumulate(memory_bytes, initial=0)), memory_limit_bytes)
        num_needed = len(_greedy_cuts(memory_ends)) - 1
        if num_needed > num_partitions:
            raise ValueError(
                f"A memory limit of {memory_limit_bytes:,} bytes per partition needs at least {num_needed} partitions, "
                f"but num_partitions is {num_partitions}; raise the limit or the number of partitions."
            )
    elif memory_bytes is not None or memory_limit_bytes is not None:
        missing = "memory_limit_bytes" if memory_limit_bytes is None else "memory_bytes"
        raise ValueError(f"{missing} is None; give both memory_bytes and memory_limit_bytes, or neither.")
    limit = _smallest_maximum(prefix, memory_ends, num_partitions)
    if objective == "variance":
        limit = _largest_useful_sum(prefix, _limit_ends(prefix, limit, memory_ends), num_partitions)
    cuts = _least_squares_cuts(prefix, _limit_ends(prefix, limit, memory_ends), num_partitions)
    return [end - start for start, end in pairwise(cuts)]


def _smallest_maximum(prefix: list[int], memory_ends: list[int], num_partitions: int) -> int:
    """Find the smallest sum that no partition of some valid cut exceeds, by bisection.

    A cut into fewer than K partitions also counts: splitting one of them raises no sum.
    """
    low = max(end - start for start, end in pairwise(prefix))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if len(_greedy_cuts(_limit_ends(prefix, middle, memory_ends))) - 1 <= num_partitions:
            high = middle
        else:
            low = middle + 1
    return low


def _largest_useful_sum(prefix: list[int], ends: list[int], num_partitions: int) -> int:
    """Bound the sum of any partition of a minimum-variance cut, so that the search for it stays narrow.

    With T the total and U the squares of a known cut, a partition of sum p leaves at best K - 1 equal ones:
    p^2 + (T - p)^2 / (K - 1) <= U, solved for p. The known cut may have fewer than K partitions, as splitting lowers U.
    """
    cuts = _greedy_cuts(ends)
    squares = sum((prefix[end] - prefix[start]) ** 2 for start, end in pairwise(cuts))
    total, k = prefix[-1], num_partitions
    return (total + math.isqrt((k - 1) * (k * squares - total**2))) // k


def _least_squares_cuts(prefix: list[int], ends: list[int], num_partitions: int) -> list[int]:
    """Return the K + 1 positions of the cut with the least sum of squares, where no partition exceeds its `ends`.

    best_k(j) = min over i of best_{k-1}(i) + (prefix[j] - prefix[i])^2. Once the later of two starts is better at some
    j, it stays better at every larger j: the cost of a partition is Monge, even where `ends` makes it infinite. So the
    starts that are best somewhere form a queue, ordered by the j from which each is best: about K * L steps in all.
    """
    best = {0: 0}
    choices = []
    for first, last in _reachable_ranges(ends, num_partitions):
        intercepts = {i: value + prefix[i] ** 2 for i, value in best.items()}
        queue: list[int] = []
        begins: list[int] = []
        for start in intercepts:
            begin = start + 1
            while queue and (begin := _takeover(prefix, ends, intercepts, queue[-1], start)) <= begins[-1]:
                queue.pop()
                begins.pop()
                begin = start + 1
            queue.append(start)
            begins.append(begin)
        choice = {j: queue[bisect_right(begins, j) - 1] for j in range(first, last + 1)}
        best = {j: best[i] + (prefix[j] - prefix[i]) ** 2 for j, i in choice.items()}
        choices.append(choice)
    cuts = [len(ends)]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return cuts[::-1]


def _takeover(prefix: list[int], ends: list[int], intercepts: dict[int, int], earlier: int, later: int) -> int:
    """Return the first end for which starting at `later` beats starting at `earlier`, which wins ties."""
    gap, rise = prefix[later] - prefix[earlier], intercepts[later] - intercepts[earlier]
    better = later + 1 if rise < 0 else len(prefix)
    if gap:
        better = bisect_right(prefix, rise // (2 * gap), later + 1)
    return max(later + 1, min(better, ends[earlier] + 1))


def _reachable_ranges(ends: list[int], num_partitions: int) -> list[tuple[int, int]]:
    """Return, for k = 1..K, the first and last layer boundary at which partition k of a valid cut can end."""
    num_layers = len(ends)
    lasts, firsts = [0], [num_layers]
    for k in range(1, num_partitions + 1):
        lasts.append(min(ends[lasts[-1]], num_layers - num_partitions + k) if k < num_partitions else num_layers)
        firsts.append(max(bisect_left(ends, firsts[-1]), num_partitions - k))
    return list(zip(firsts[::-1][1:], lasts[1:], strict=True))


def _limit_ends(prefix: list[int], limit: int, memory_ends: list[int]) -> list[int]:
    return [min(pair) for pair in zip(_furthest_ends(prefix, limit), memory_ends, strict=True)]


def _furthest_ends(prefix: Sequence[int], limit: int) -> list[int]:
    """Return, for each start, the furthest end such that the layers between them sum to at most `limit`."""
    return [bisect_right(prefix, start + limit) - 1 for start in prefix[:-1]]


def _greedy_cuts(ends: list[int]) -> list[int]:
    """Return the positions of the cut with the fewest partitions: each reaches as far as `ends` allows."""
    cuts = [0]
    while cuts[-1] < len(ends):
        cuts.append(ends[cuts[-1]])
    return cuts


def _exact_integers(costs: Sequence[float]) -> list[int]:
    """Scale costs by one common factor to integers: any float is a fraction whose denominator is a power of two."""
    fractions = [Fraction(int(cost) if isinstance(cost, Integral) else float(cost)) for cost in costs]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _check_counts(costs: Sequence[float], num_partitions: int, objective: str) -> None:
    if objective not in ("max", "variance"):
        raise ValueError(f'objective is {objective!r}; choose "max" or "variance".')
    if len(costs) == 0:  # an array has no truth value
        raise ValueError("costs is empty; give the cost of at least one layer.")
    if not 1 <= num_partitions <= len(costs):
        raise ValueError(
            f"num_partitions is {num_partitions}, but {len(costs)} layers can make from 1 to {len(costs)} non-empty "
            "partitions; choose a number in that range."
        )
    for index, cost in enumerate(costs):
        if not isinstance(cost, SupportsFloat):
            raise TypeError(
                f"The cost of layer {index} is of type {type(cost).__name__}; give numbers, such as "
                "[cost.flops for cost in gpipe.analyze_layers(layers, example)]."
            )
        if not (cost >= 0 and cost != math.inf):
            raise ValueError(f"The cost of layer {index} is {cost}; give every layer a finite cost of at least 0.")


def _check_memory(memory_bytes: Sequence[int], limit: int, num_layers: int) -> None:
    if len(memory_bytes) != num_layers:
        raise ValueError(f"memory_bytes has {len(memory_bytes)} entries for {num_layers} layers; give one per layer.")
    for index, size in enumerate(memory_bytes):
        if size < 0:
            raise ValueError(f"memory_bytes of layer {index} is {size}; give every layer a size of at least 0.")
        if size > limit:
            raise ValueError(
                f"Layer {index} alone needs {size:,} bytes, above the limit of {limit:,} bytes per partition; "
                "raise the limit or split that layer."
            )
