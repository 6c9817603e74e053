"""A cut names every layer once."""

import re
from typing import Any

import pytest

import gpipe
from gpipe.pipeline.partition import check_partitions, partition_ranges


def test_partitions_become_ranges_of_layers() -> None:
    assert partition_ranges([2, 1, 3]) == [range(2), range(2, 3), range(3, 6)]


def test_partitions_that_cover_the_layers_are_accepted() -> None:
    check_partitions((2, 1, 3), 6)
    check_partitions(gpipe.partition_layers([1, 2, 3], 2), 3)


@pytest.mark.parametrize(
    ("partitions", "fault"),
    [
        ([], "partitions is []"),
        ([3, 0], "partitions is [3, 0]"),
        ([4, -1], "partitions is [4, -1]"),
        ([1.5, 1.5], "partitions is [1.5, 1.5]"),
        ([1, 1], "partitions is [1, 1], which covers 2 layers"),
    ],
)
def test_partitions_that_leave_layers_out_or_are_empty_are_refused(partitions: list[Any], fault: str) -> None:
    remedy = "give positive whole numbers that sum to the 3 layers, as partition_layers returns them."
    with pytest.raises(ValueError, match=f"^{re.escape(f'{fault}; {remedy}')}$"):
        check_partitions(partitions, 3)
