"""How many bytes of a tensor travel."""

import pytest
import torch
from torch import Tensor

from gpipe.pipeline.wire.format import count_bytes

X = torch.zeros(4, 6, 5)


@pytest.mark.parametrize(
    "view",
    [
        X, X.transpose(0, 2), X[:, ::2], X[::3, :, 1:3], X.permute(2, 0, 1)[1::2], X[:, :, :1:5],
        torch.zeros(4, 2)[:, :1:5],
    ],
    ids=lambda view: f"{tuple(view.shape)}, {view.stride()}",
)  # fmt: skip
def test_each_element_travels_once_and_holes_do_not(view: Tensor) -> None:
    assert count_bytes(view) == view.numel() * 4


def test_an_expanded_dimension_travels_once_and_windows_as_the_memory_below_them() -> None:
    assert count_bytes(X[:, :1].expand(4, 6, 5)) == 4 * 5 * 4
    assert count_bytes(torch.zeros(9).unfold(0, 3, 2)) == 9 * 4
