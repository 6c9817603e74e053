"""Mini-batches whose size is counted in tokens."""

import numpy as np
from numpy.typing import NDArray

Bounds = list[tuple[int, int]]  # first and one behind the last of each mini-batch


def cut_by_tokens(lengths: NDArray[np.int32], batch_size: int) -> Bounds:
    """Cut sentences of ascending lengths into runs, each as long as it may be.

        lengths  1 1 2 2 2 3 | 4 4 5 | 7 7 | 9      batch_size 18: sentences x the longest of a run

    lengths: tokens of each sentence, ascending, none above batch_size. Takes time in proportion to the runs.
    """
    ascending = lengths.tolist()
    bounds = []
    start = 0
    while start < len(ascending):
        most = min(len(ascending), start + batch_size // ascending[start])
        # The size grows with the end of the run, so the last end that fits is found by halving.
        first, last = start + 1, most
        while first < last:
            middle = (first + last + 1) // 2
            fits = (middle - start) * ascending[middle - 1] <= batch_size
            first, last = (middle, last) if fits else (first, middle - 1)
        end = first
        bounds.append((start, end))
        start = end
    return bounds


def fill_last(bounds: Bounds, least: int) -> Bounds:
    """Give the last run at least so many sentences, from the one before, where that one can spare them.

    Every run but the last has at least `least` sentences, as `cut_by_tokens` makes them if batch_size is at least
    `least` x the longest. A last run of longer sentences stays below batch_size: `least` of any length fit.
    Raises ValueError where the two have too few for both.
    """
    start, end = bounds[-1]
    missing = least - (end - start)
    if missing <= 0:
        return bounds
    before = bounds[-2] if len(bounds) > 1 else (start, start)
    if before[1] - before[0] - missing < least:
        raise ValueError(
            f"the last {end - before[0]} sentences make no mini-batches of at least {least}, one a replica: choose "
            "another batch_size, or fewer replicas"
        )
    return [*bounds[:-2], (before[0], start - missing), (start - missing, end)]
