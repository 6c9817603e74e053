"""The cut of L layers into K partitions of consecutive layers; `gpipe.partition_layers` finds the best one."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def partition_ranges(partitions: Sequence[int]) -> list[range]:
    """Return the layer indices of each partition: [2, 1] gives [range(0, 2), range(2, 3)]."""
    return [range(start, end) for start, end in pairwise(accumulate(partitions, initial=0))]


def check_partitions(partitions: Sequence[int], num_layers: int) -> None:
    """Refuse numbers of layers that do not cut `num_layers` layers into non-empty partitions.

    Raises:
        TypeError: `partitions` is not a sequence, but for example the number of partitions.
        ValueError: no partition, one that is not a positive whole number, or a sum other than `num_layers`.
    """
    remedy = f"give positive whole numbers that sum to the {num_layers} layers, as partition_layers returns them"
    if not isinstance(partitions, Sequence):
        raise TypeError(f"partitions is {partitions!r}; {remedy}.")
    numbers = list(partitions)
    if not numbers or not all(isinstance(number, int) and number >= 1 for number in numbers):
        raise ValueError(f"partitions is {numbers}; {remedy}.")
    if sum(numbers) != num_layers:
        raise ValueError(f"partitions is {numbers}, which covers {sum(numbers)} layers; {remedy}.")
