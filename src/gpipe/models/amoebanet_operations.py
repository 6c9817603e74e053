"""The operations of an AmoebaNet cell.

Every tensor is [examples, channels, height, width]. Stride 2 makes height and width ceil(size / 2). An operation that
begins with a ReLU has `rectified_input` and leaves the ReLU to its caller, so operations on one state share one ReLU.

Deviation: AmoebaNet's convolutions and 3x3 pools pad symmetrically, as is usual in PyTorch. TensorFlow's "SAME" in the
public TPU code pads an even size at stride 2 only at the right and bottom. Shapes and parameters are the same.

Sources: Real et al. 2019 and the public TPU code (tensorflow/tpu, models/official/amoeba_net).
"""

import math
import re
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.linear import fill_truncated_normal

NormFactory = Callable[[int], nn.BatchNorm2d]
"""Number of channels -> batch norm."""


class Conv2d(nn.Conv2d):
    """Convolution without bias, padded to keep the size at stride 1, with the initialisation of the public TPU code."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int] = (1, 1),
        *,
        stride: int | tuple[int, int] = 1,
        groups: int = 1,
        padded: bool = True,
    ) -> None:
        padding = (kernel_size[0] // 2, kernel_size[1] // 2) if padded else (0, 0)
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        """Redraw the weights with variance 2 / fan-out, where a depthwise kernel's fan-out is its area."""
        fan_out = self.out_channels // self.groups * math.prod(self.kernel_size)
        fill_truncated_normal(self.weight, 2.0 / fan_out)


class Operation(nn.Module):
    """Base of all operations; the caller applies a ReLU to the input if `rectified_input` is True."""

    rectified_input: ClassVar[bool] = True


class Identity(Operation):
    """`none`, if neither size nor channels change."""

    rectified_input = False

    def forward(self, state: Tensor) -> Tensor:
        return state


class ConvNorm(Operation):
    """A convolution and its batch norm."""

    def __init__(self, conv: Conv2d, norm: NormFactory) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm(conv.out_channels)

    def forward(self, state: Tensor) -> Tensor:
        output: Tensor = self.norm(self.conv(state))
        return output


class Bottleneck(Operation):
    """`3x3` and `1x7_7x1`: 1x1 to a quarter of the channels, the kernels, 1x1 back; a batch norm after each.

    The kernels share the stride: a kernel of height 1 strides only over the width, one of width 1 only over the height.
    Deviation: an AmoebaNet bottleneck of fewer than 4 channels narrows to 1 channel; the public TPU code drops the
    bottleneck. No model of the paper is so narrow.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernels: list[tuple[int, int]], stride: int, norm: NormFactory
    ) -> None:
        super().__init__()
        width = max(out_channels // 4, 1)
        self.squeeze = ConvNorm(Conv2d(in_channels, width), norm)
        self.core = nn.ModuleList()
        for height_size, width_size in kernels:
            strides = (1 if height_size == 1 else stride, 1 if width_size == 1 else stride)
            self.core.append(ConvNorm(Conv2d(width, width, (height_size, width_size), stride=strides), norm))
        self.expand = ConvNorm(Conv2d(width, out_channels), norm)

    def forward(self, state: Tensor) -> Tensor:
        state = self.squeeze(state)
        for conv_norm in self.core:
            state = conv_norm(F.relu(state))
        output: Tensor = self.expand(F.relu(state))
        return output


class SeparableConv(Operation):
    """One depthwise and pointwise convolution with one batch norm after both."""

    def __init__(self, in_channels: int, out_channels: int, size: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        self.depthwise = Conv2d(in_channels, in_channels, (size, size), stride=stride, groups=in_channels)
        self.pointwise = Conv2d(in_channels, out_channels)
        self.norm = norm(out_channels)

    def forward(self, state: Tensor) -> Tensor:
        output: Tensor = self.norm(self.pointwise(self.depthwise(state)))
        return output


class DoubleSeparableConv(Operation):
    """`sep3x2`, `sep5x2`, `sep7x2`: two separable convolutions; the first one has the stride."""

    def __init__(self, in_channels: int, out_channels: int, size: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        self.first = SeparableConv(in_channels, out_channels, size, stride, norm)
        self.second = SeparableConv(out_channels, out_channels, size, 1, norm)

    def forward(self, state: Tensor) -> Tensor:
        output: Tensor = self.second(F.relu(self.first(state)))
        return output


class Pool(Operation):
    """`avg3`, `max3`, `max2`: a pool, then 1x1 and batch norm if the channels change.

    Averages exclude the padding, as in TensorFlow. A 2x2 window, which occurs only at stride 2, extends beyond the
    right and bottom edges of an odd size.
    """

    rectified_input = False

    def __init__(
        self, kind: str, in_channels: int, out_channels: int, size: int, stride: int, norm: NormFactory
    ) -> None:
        super().__init__()
        self.average, self.size, self.stride, self.padding = kind == "avg", size, stride, (size - 1) // 2
        self.project = ConvNorm(Conv2d(in_channels, out_channels), norm) if in_channels != out_channels else None

    def extra_repr(self) -> str:
        return f"{'average' if self.average else 'max'}, size={self.size}, stride={self.stride}"

    def forward(self, state: Tensor) -> Tensor:
        size, stride, padding = self.size, self.stride, self.padding
        if self.average:
            state = F.avg_pool2d(state, size, stride, padding, count_include_pad=False)
        else:
            # ceil_mode matters only for the unpadded 2x2 window.
            state = F.max_pool2d(state, size, stride, padding, ceil_mode=size == 2)
        return state if self.project is None else self.project(state)


class FactorizedReduction(Operation):
    """Halve the size by two 1x1 convolutions of stride 2, the second shifted by one pixel to the right and bottom.

    Each makes half of the channels; one batch norm follows their concatenation. Zeros pad the edge.
    Deviation: the public TPU code refuses a factorised reduction to an odd number of channels, which AmoebaNet-A (18,
    190) has in its second cell. Ours rounds both halves down, and the last channel is only the batch norm's shift. A
    convolution for it would make that model 32 parameters larger.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels // 2)
        self.shifted_conv = Conv2d(in_channels, out_channels // 2)
        self.is_odd = out_channels % 2 == 1
        self.norm = norm(out_channels)

    def forward(self, state: Tensor) -> Tensor:
        # A strided 1x1 convolution reads one pixel in four: selecting those first keeps only them for backward.
        shifted = state[:, :, 1::2, 1::2]
        height, width = state.shape[2:]
        if height % 2 or width % 2:
            shifted = F.pad(shifted, (0, width % 2, 0, height % 2))
        halves = [self.conv(state[:, :, ::2, ::2]), self.shifted_conv(shifted)]
        if self.is_odd:
            halves.append(torch.zeros_like(halves[0][:, :1]))
        output: Tensor = self.norm(torch.cat(halves, dim=1))
        return output


def make_operation(name: str, in_channels: int, out_channels: int, stride: int, norm: NormFactory) -> Operation:
    """Make the operation that a genotype calls `name`.

    The prefix of `dil2sep5x2` is ignored, as in the public TPU code, from which the published parameter counts and
    accuracies come.

    Raises:
        ValueError: no genotype uses the name.
    """
    if name == "none" and stride == 1 and in_channels == out_channels:
        return Identity()
    if name in ("none", "1x1"):
        return ConvNorm(Conv2d(in_channels, out_channels, stride=stride), norm)
    if name == "3x3":
        return Bottleneck(in_channels, out_channels, [(3, 3)], stride, norm)
    if name == "1x7_7x1":
        return Bottleneck(in_channels, out_channels, [(1, 7), (7, 1)], stride, norm)
    if match := re.fullmatch(r"(?:dil2)?sep([357])x2", name):
        return DoubleSeparableConv(in_channels, out_channels, int(match[1]), stride, norm)
    if (match := re.fullmatch(r"(avg|max)([23])", name)) and (match[2] == "3" or stride == 2):
        return Pool(match[1], in_channels, out_channels, int(match[2]), stride, norm)
    raise ValueError(f"operation is {name!r} at stride {stride}, expected one of the genotype table's operations.")
