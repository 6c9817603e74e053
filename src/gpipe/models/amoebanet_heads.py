"""The layers around AmoebaNet's cells: the stem, the classifier and the auxiliary head."""

import math

from torch import Tensor, nn
from torch.nn import functional as F

from gpipe.models.amoebanet_operations import Conv2d, ConvNorm, NormFactory
from gpipe.models.linear import Softmax

STEM_CHANNELS = 32


class Stem(ConvNorm):
    """Map images to the first state: unpadded 3x3 convolution of stride 2 to 32 channels, and batch norm.

    [n, image_channels, h, w] -> [n, 32, (h - 1) // 2, (w - 1) // 2]
    """

    same_without_graph = True  # as for Cell

    def __init__(self, image_channels: int, norm: NormFactory) -> None:
        super().__init__(Conv2d(image_channels, STEM_CHANNELS, (3, 3), stride=2, padded=False), norm)


class Classifier(nn.Module):
    """Map the last payload to logits: ReLU, global average pool, dropout, fully connected.

    ([n, in_channels, h, w], ...) -> logits [n, num_classes]; (logits, auxiliary_logits) if the payload has both
    """

    same_without_graph = True  # as for Cell

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.dropout = nn.Dropout(dropout)
        self.fully_connected: nn.Module = Softmax(in_channels, num_classes)

    def pool(self, state: Tensor) -> Tensor:
        """Pool to the softmax layer's input: [n, in_channels, h, w] -> [n, in_channels]."""
        features: Tensor = self.dropout(F.relu(state).mean(dim=(2, 3)))
        return features

    def forward(self, payload: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        state, _, *auxiliary = payload
        logits: Tensor = self.fully_connected(self.pool(state))
        return (logits, auxiliary[0]) if auxiliary else logits


class AuxiliaryHead(nn.Module):
    """Map the output of a cell to auxiliary logits, for training only.

    [n, in_channels, *map_size] -> [n, num_classes]: ReLU, 5x5 average pool of stride 3, 1x1 to 51, batch norm, ReLU,
    convolution of the whole map to 307, batch norm, ReLU, fully connected (Real et al. 2019; the widths are 0.4
    times Inception's 128 and 768). Its weights fit only one map size, and so only one image size.

    Deviation: the auxiliary head's 5x5 pool shrinks to the map if that is smaller, for images below about 70 pixels.
    The paper has none.
    """

    def __init__(self, in_channels: int, num_classes: int, map_size: tuple[int, int], norm: NormFactory) -> None:
        super().__init__()
        self.map_size = map_size
        self.window = (min(5, map_size[0]), min(5, map_size[1]))
        height, width = ((size - window) // 3 + 1 for size, window in zip(map_size, self.window, strict=True))
        self.project = ConvNorm(Conv2d(in_channels, int(0.4 * 128)), norm)
        self.whole_map = ConvNorm(Conv2d(int(0.4 * 128), int(0.4 * 768), (height, width), padded=False), norm)
        self.fully_connected = Softmax(int(0.4 * 768), num_classes)

    def forward(self, state: Tensor) -> Tensor:
        if state.shape[2:] != self.map_size:
            raise ValueError(
                f"the auxiliary head got a map of {tuple(state.shape[2:])}, expected {self.map_size}: "
                "build the model with the image_size of its training images."
            )
        state = F.avg_pool2d(F.relu(state), self.window, stride=3)
        state = F.relu(self.whole_map(F.relu(self.project(state))))
        logits: Tensor = self.fully_connected(state.flatten(1))
        return logits


def count_auxiliary_parameters(layers: nn.Module) -> int:
    """Count the parameters of the auxiliary head, which only training uses."""
    heads = [module for module in layers.modules() if isinstance(module, AuxiliaryHead)]
    return sum(parameter.numel() for head in heads for parameter in head.parameters())


def compute_auxiliary_map_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the size of the auxiliary head's input, after the stem and three reduction cells."""
    height, width = (math.ceil((size - 1) // 2 / 8) for size in image_size)
    return height, width
