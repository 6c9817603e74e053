"""The operations against what one can work out by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from gpipe.models.amoebanet_operations import (
    Bottleneck,
    Conv2d,
    DoubleSeparableConv,
    FactorizedReduction,
    Identity,
    make_operation,
)

# Without its epsilon a fresh batch norm in eval mode is the identity.
norm = partial(nn.BatchNorm2d, eps=0.0)
NAMES = ["none", "1x1", "3x3", "1x7_7x1", "sep3x2", "sep5x2", "sep7x2", "dil2sep5x2", "avg3", "max3"]


@pytest.mark.parametrize("name", [*NAMES, "max2"])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_stride_2_halves_every_size_rounded_up(name: str, size: int) -> None:
    operation = make_operation(name, 6, 8, 2, norm).eval()
    assert operation(torch.randn(1, 6, size, 9)).shape == (1, 8, (size + 1) // 2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_stride_1_keeps_the_size_and_changes_the_channels(name: str) -> None:
    operation = make_operation(name, 6, 8, 1, norm).eval()
    assert operation(torch.randn(1, 6, 5, 4)).shape == (1, 8, 5, 4)


def test_the_factorized_reduction_reads_the_even_pixels_and_the_odd_pixels() -> None:
    reduction = FactorizedReduction(1, 2, norm).eval()
    nn.init.ones_(reduction.conv.weight)
    nn.init.ones_(reduction.shifted_conv.weight)
    image = torch.arange(15.0).reshape(1, 1, 3, 5)  # rows 0-4, 5-9, 10-14
    even, odd = reduction(image)[0]
    assert even.tolist() == [[0, 2, 4], [10, 12, 14]]
    assert odd.tolist() == [[6, 8, 0], [0, 0, 0]]


def test_the_factorized_reduction_of_odd_channels_has_one_without_a_convolution() -> None:
    reduction = FactorizedReduction(4, 5, norm).eval()
    nn.init.constant_(reduction.norm.bias, 3.0)
    output = reduction(torch.randn(2, 4, 6, 6))
    assert output.shape == (2, 5, 3, 3)
    assert (output[:, -1] == 3.0).all() and not (output[:, :-1] == 3.0).any()


def test_the_average_pool_leaves_the_padding_out() -> None:
    ones = torch.ones(1, 2, 5, 5)
    assert torch.equal(make_operation("avg3", 2, 2, 1, norm)(ones), ones)


def test_max3_is_a_max_pool_and_pads_below_every_value() -> None:
    image = -torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)  # rows -1..-3, -4..-6, -7..-9
    pooled = make_operation("max3", 1, 1, 1, norm)(image)
    assert pooled[0, 0].tolist() == [[-1, -1, -2], [-1, -1, -2], [-4, -4, -5]]


def test_max2_hangs_over_the_right_and_bottom_edge() -> None:
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert make_operation("max2", 1, 1, 2, norm)(image)[0, 0].tolist() == [[4, 5], [7, 8]]


def test_none_is_the_identity_only_where_nothing_changes() -> None:
    assert isinstance(make_operation("none", 8, 8, 1, norm), Identity)
    assert not isinstance(make_operation("none", 8, 8, 2, norm), Identity)
    assert not isinstance(make_operation("none", 4, 8, 1, norm), Identity)


def test_the_7x1_kernel_strides_over_the_height_and_the_1x7_kernel_over_the_width() -> None:
    operation = make_operation("1x7_7x1", 8, 8, 2, norm)
    assert isinstance(operation, Bottleneck)
    convs = [conv_norm.conv for conv_norm in operation.core]
    assert [(conv.kernel_size, conv.stride) for conv in convs] == [((1, 7), (1, 2)), ((7, 1), (2, 1))]
    assert convs[0].in_channels == 2


def test_the_stride_of_separable_convolutions_is_in_the_first() -> None:
    operation = make_operation("sep5x2", 4, 8, 2, norm)
    assert isinstance(operation, DoubleSeparableConv)
    assert (operation.first.depthwise.stride, operation.second.depthwise.stride) == ((2, 2), (1, 1))


def test_the_dilation_is_ignored() -> None:
    torch.manual_seed(0)
    dilated = make_operation("dil2sep5x2", 4, 4, 1, norm).eval()
    torch.manual_seed(0)
    plain = make_operation("sep5x2", 4, 4, 1, norm).eval()
    image = torch.randn(1, 4, 6, 6)
    assert torch.equal(dilated(image), plain(image))


@pytest.mark.parametrize(("name", "stride"), [("max2", 1), ("sep9x2", 1), ("skip", 2)])
def test_an_unknown_operation_is_refused(name: str, stride: int) -> None:
    with pytest.raises(ValueError, match=f"operation is '{name}' at stride {stride}"):
        make_operation(name, 4, 4, stride, norm)


def test_weights_have_the_variance_of_their_fan_out_and_are_cut_at_two_deviations() -> None:
    torch.manual_seed(0)
    for conv, fan_out in ((Conv2d(64, 96, (3, 3)), 96 * 9), (Conv2d(512, 512, (5, 5), groups=512), 25)):
        std = (2.0 / fan_out) ** 0.5
        assert conv.weight.std().item() == pytest.approx(std, rel=0.02)
        assert conv.weight.abs().max().item() <= 2 * std * 1.3**0.5
