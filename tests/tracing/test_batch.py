"""Numbers that follow the number of examples are computed anew for each, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpipe
from gpipe.tracing.errors import TracingError
from tests.tracing.models import Parts


@pytest.mark.parametrize("is_counted_first", [False, True])
def test_no_cut_lies_where_the_number_of_examples_is_lost_and_needed(*, is_counted_first: bool) -> None:
    class Pooling(Parts):
        def forward(self, x: Tensor) -> Tensor:
            mean = self.b(self.a(x).mean(0)).masked_fill(torch.arange(4) > 2, float("nan"))
            if is_counted_first:
                return self.c(mean.expand(len(x), -1)).nan_to_num()
            return self.c(self.b(mean.nan_to_num())) * torch.ones(len(x), 1)

    model, x = Pooling(), torch.randn(5, 4)
    layers = gpipe.as_layers(model, x[:2])
    assert len(layers) > 1 and torch.equal(layers(x), model(x))


def test_a_tensor_as_long_as_the_batch_may_have_one_value_for_any_number_of_examples() -> None:
    class Halved(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * torch.full((len(x), 1), 0.5))

    model, x = Halved(), torch.randn(12, 4)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


def test_a_tensor_as_long_as_the_batch_may_be_viewed_in_another_shape() -> None:
    class Viewed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + torch.ones(len(x), 2, 4).to(x).view(2 * len(x), 4)[: len(x)]

    model, x = Viewed(), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


def test_a_tensor_that_code_makes_may_have_nan() -> None:
    class Missing(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(torch.where(x > 0, torch.tensor(float("nan")), x).nan_to_num())

    model, x = Missing(), torch.randn(5, 4)
    assert torch.equal(gpipe.as_layers(model, x[:2])(x), model(x))


def test_numbers_that_follow_the_batch_in_another_way_are_refused() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (len(x) ** 2)

    with pytest.raises(
        TracingError, match=r"py, line \d+: computes with \(9, 16, 1089\) for \(3, 4, 33\) examples, which is"
    ):
        gpipe.as_layers(Square(), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1 if len(x) % 2 else x,
        lambda x: x * (2 if len(x) > 16 else 1),
    ],
)
def test_code_that_treats_even_or_many_examples_otherwise_is_refused(compute: Callable[[Tensor], Tensor]) -> None:
    class Treating(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(compute(self.a(x)))

    with pytest.raises(TracingError, match=r"for a different number of examples|which is not linear in their number"):
        gpipe.as_layers(Treating(), torch.randn(3, 4))
