"""AmoebaNet-A, B, C and D as sequences of layers (Real et al. 2019; paper section 4, appendix and Table 1).

    0           stem: convolution 3x3 of stride 2
    1, 2        reduction cells, D/4 and D/2 wide
    3 ...       num_layers / 3 normal cells, D wide
    ...         a reduction cell and num_layers / 3 normal cells, 2D wide, then the auxiliary head
    ...         a reduction cell and num_layers / 3 normal cells, 4D wide
    last        classifier

D is `num_filters`. Each cell is one layer. Indices and names are the same with and without the auxiliary head.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, TypedDict, Unpack

from torch import Tensor, nn

from gpipe.models.amoebanet_cells import Cell
from gpipe.models.amoebanet_genotypes import GENOTYPES
from gpipe.models.amoebanet_heads import STEM_CHANNELS, AuxiliaryHead, Classifier, Stem, compute_auxiliary_map_size
from gpipe.models.checks import check_probability
from gpipe.models.linear import Softmax


class AmoebaNet(nn.Sequential):
    """A sequence of AmoebaNet layers, with the attributes of timm's models."""

    # timm's description of the model, which only timm.create_model sets
    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]

    @property
    def classifier(self) -> Classifier:
        """The last layer."""
        layer = self[-1]
        assert isinstance(layer, Classifier), "use the whole model: a part of it has no classifier"
        return layer

    @property
    def num_features(self) -> int:
        """The width of the features before the softmax layer."""
        return self.classifier.in_channels

    @property
    def num_classes(self) -> int:
        """The number of logits; 0 if the softmax layer was removed."""
        layer = self.classifier.fully_connected
        return layer.out_features if isinstance(layer, Softmax) else 0

    def get_classifier(self) -> nn.Module:
        """Return the softmax layer."""
        return self.classifier.fully_connected

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the softmax layer, and the auxiliary head's, with new ones with random weights.

        With 0 classes, remove the softmax layer and the auxiliary head: the output is then the features
        [n, num_features].

        Raises:
            ValueError: global_pool is not the global average.
        """
        refuse_other_pool(global_pool)
        weight = next(self.classifier.parameters(), next(self.parameters()))
        softmax = partial(Softmax, device=weight.device, dtype=weight.dtype)
        self.classifier.fully_connected = softmax(self.num_features, num_classes) if num_classes else nn.Identity()
        for layer in self:
            if isinstance(layer, Cell) and layer.auxiliary_head is not None:
                head = layer.auxiliary_head
                if num_classes:
                    head.fully_connected = softmax(head.fully_connected.in_features, num_classes)
                else:
                    layer.auxiliary_head = None

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the output of the last cell: [n, num_features, h, w]."""
        features: Tensor = self[:-1](images)[0]
        return features

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits of `features` or, with pre_logits, the softmax layer's input."""
        pooled = self.classifier.pool(features)
        logits: Tensor = pooled if pre_logits else self.get_classifier()(pooled)
        return logits


def refuse_other_pool(global_pool: str | None) -> None:
    """Refuse a pool before the softmax layer other than the global average, which None means too."""
    if global_pool not in (None, "avg"):
        raise ValueError(f"global_pool is {global_pool!r}, expected 'avg': AmoebaNet has no other pool.")


def _plan_cells(num_layers: int, num_filters: int) -> Iterator[tuple[str, int]]:
    """Yield the kind and the width of each cell in order."""
    yield "reduction", num_filters // 4
    yield "reduction", num_filters // 2
    for group, width in enumerate((num_filters, 2 * num_filters, 4 * num_filters)):
        if group > 0:
            yield "reduction", width
        for _ in range(num_layers // 3):
            yield "normal", width


class AmoebaNetOptions(TypedDict, total=False):
    """The keyword arguments of the four AmoebaNets.

    Attributes:
        image_channels: 3 by default.
        image_size: pixels, or (height, width); by default 331 for A and C, 480 for B, 224 for D. Only the auxiliary
            head depends on it.
        auxiliary_head: add auxiliary logits to the output in training mode (loss weight 0.4 in the recipe). False by
            default.
        dropout: the probability before the softmax layer, 0 by default; Real et al. 2019 use 0.5.
        drop_path: the initial drop-path rate, 0 by default; `set_drop_path` changes it later. Real et al. 2019 end at
            0.3.
        batch_norm_momentum: the weight of a new mini-batch, 0.0003 by default: 1 minus the public TPU code's decay of
            0.9997. Runs of fewer than about ten thousand steps need more, such as 0.1.
        batch_norm_epsilon: 0.001 by default.
    """

    image_channels: int
    image_size: int | tuple[int, int]
    auxiliary_head: bool
    dropout: float
    drop_path: float
    batch_norm_momentum: float
    batch_norm_epsilon: float


def _amoebanet(
    variant: str,
    num_layers: int,
    num_filters: int,
    num_classes: int,
    *,
    image_channels: int = 3,
    image_size: int | tuple[int, int] = 224,
    auxiliary_head: bool = False,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    batch_norm_momentum: float = 0.0003,
    batch_norm_epsilon: float = 0.001,
) -> AmoebaNet:
    image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if num_layers < 3 or num_layers % 3:
        raise ValueError(
            f"num_layers is {num_layers}, expected a multiple of 3: the normal cells form three equal groups."
        )
    if num_filters < 8:
        raise ValueError(f"num_filters is {num_filters}, expected 8 or more: the first cell has a quarter of them.")
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}, expected 1 or more: give the number of labels.")
    if min(image_size) < 3:
        raise ValueError(f"image_size is {image_size}, expected 3 pixels or more: the stem's kernel is not padded.")
    check_probability("dropout", dropout)
    check_probability("drop_path", drop_path)
    norm = partial(nn.BatchNorm2d, eps=batch_norm_epsilon, momentum=batch_norm_momentum)

    stem = Stem(image_channels, norm)
    cells: list[Cell] = []
    previous_channels, channels, previous_is_larger = None, STEM_CHANNELS, False
    for kind, width in _plan_cells(num_layers, num_filters):
        genotype = GENOTYPES[variant, kind]
        cell = Cell(genotype, width, channels, previous_channels, previous_is_larger, drop_path, norm)
        previous_channels, channels, previous_is_larger = channels, cell.out_channels, kind == "reduction"
        cells.append(cell)
    if auxiliary_head:
        # Cells so far: two reductions, the first group, a reduction, the second group.
        last_of_second_group = cells[2 + 2 * (num_layers // 3)]
        last_of_second_group.auxiliary_head = AuxiliaryHead(
            last_of_second_group.out_channels, num_classes, compute_auxiliary_map_size(image_size), norm
        )
    return AmoebaNet(stem, *cells, Classifier(channels, num_classes, dropout))


def amoebanet_a(
    num_layers: int = 18, num_filters: int = 190, num_classes: int = 1000, **options: Unpack[AmoebaNetOptions]
) -> AmoebaNet:
    """Build AmoebaNet-A, by default of Real et al.'s size; options are those of AmoebaNetOptions.

    [n, image_channels, h, w] -> logits [n, num_classes], or (logits, auxiliary_logits) in training with the auxiliary
    head.

    Raises:
        ValueError: a value is out of range.
        TypeError: an option is unknown.
    """
    options.setdefault("image_size", 331)
    return _amoebanet("A", num_layers, num_filters, num_classes, **options)


def amoebanet_b(
    num_layers: int = 18, num_filters: int = 512, num_classes: int = 1000, **options: Unpack[AmoebaNetOptions]
) -> AmoebaNet:
    """Build AmoebaNet-B, by default with the 557M parameters of the paper's Table 4; otherwise like `amoebanet_a`."""
    options.setdefault("image_size", 480)
    return _amoebanet("B", num_layers, num_filters, num_classes, **options)


def amoebanet_c(
    num_layers: int = 18, num_filters: int = 228, num_classes: int = 1000, **options: Unpack[AmoebaNetOptions]
) -> AmoebaNet:
    """Build AmoebaNet-C, by default of Real et al.'s size; otherwise like `amoebanet_a`."""
    options.setdefault("image_size", 331)
    return _amoebanet("C", num_layers, num_filters, num_classes, **options)


def amoebanet_d(
    num_layers: int = 18, num_filters: int = 256, num_classes: int = 1000, **options: Unpack[AmoebaNetOptions]
) -> AmoebaNet:
    """Build AmoebaNet-D, by default of the size in the paper's Table 2; otherwise like `amoebanet_a`."""
    options.setdefault("image_size", 224)
    return _amoebanet("D", num_layers, num_filters, num_classes, **options)
