"""Models that nobody here wrote, and some with code that is hard to record, each with inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe._compat.torchvision  # noqa: F401 - before torchvision and timm

# isort: split

import timm
import torchvision
import transformers
from timm.models.mlp_mixer import MlpMixer
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

SIZE = 32
EFFICIENT_BLOCKS = [
    MBConvConfig(1, 3, 1, 16, 8, 1),
    MBConvConfig(4, 3, 2, 8, 16, 2),
    MBConvConfig(4, 5, 2, 16, 24, 2),
]
MOBILE_BLOCKS = [
    InvertedResidualConfig(16, 3, 16, 16, use_se=True, activation="RE", stride=2, dilation=1, width_mult=1.0),
    InvertedResidualConfig(16, 3, 32, 24, use_se=False, activation="RE", stride=2, dilation=1, width_mult=1.0),
    InvertedResidualConfig(24, 5, 48, 24, use_se=True, activation="HS", stride=1, dilation=1, width_mult=1.0),
]


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **options)


def of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=5, **options)


class Parts(nn.Module):
    """Three linear layers, for models that tests make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))


class TwoInputs(nn.Module):
    """Has keyword arguments, several outputs, a parameter used twice, and constants, one of which follows the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor, images: Tensor, factor: float = 2.0) -> dict[str, Any]:
        batch, time = tokens.shape
        x = self.embedding(tokens) * self.scale + images.flatten(1)[:, None, :8]
        x = x + torch.zeros(batch, 1, 8) + torch.arange(time)[None, :, None] / factor
        x = torch.cat([self.token.expand(batch, -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        x = F.dropout(x, 0.3, self.training)
        return {"logits": x.reshape(batch * (time + 1), 8) @ self.embedding.weight.T, "first": x[:, 0], "none": None}


class InPlace(nn.Module):
    """Changes tensors in place of which others are views, and leaves its output unchanged by cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            left, right = x[:, :3], x[:, 3:]
            right.mul_(2)
            left += 0.5
            x[:, 0] = x[:, 1:].sum(-1)
            x = F.relu(x, inplace=True) + left.repeat(1, 2)
        return x


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(batch))


def two_inputs(batch: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {
        "tokens": torch.randint(11, (batch, 4), generator=generator),
        "images": torch.randn(batch, 1, 3, 3, generator=generator),
    }


class Numbered(nn.Module):
    """Adds to each example its number, and takes them in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            numbers = torch.arange(x.shape[0])
            x = layer(x[numbers]) + numbers[:, None]
        return x


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {**SIZES, "vocab_size": 11, "max_position_embeddings": 8}


def of_transformers(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return what makes a small model; a cache is no tensor, and an answer with one alone cannot be a layer's."""
    config = getattr(transformers, f"{name.partition('For')[0].removesuffix('LMHeadModel')}Config")
    return lambda: getattr(transformers, name)(config(**options))


def words(*names: str) -> Callable[[int], dict[str, Tensor]]:
    def draw(batch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(batch)
        return {
            name: torch.randint(2 if name == "attention_mask" else 11, (batch, 6), generator=generator)
            for name in names
        }

    return draw


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "ResNet": (of_torchvision("resnet18"), images),
    "ResNet, stochastic depth": (of_timm("resnet14t", drop_path_rate=0.3, drop_rate=0.2), images),
    "DenseNet": (of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2)), images),
    "ViT": (of_timm("vit_tiny_patch16_224", img_size=SIZE, depth=3, drop_rate=0.1, attn_drop_rate=0.2), images),
    "Swin": (
        of_timm("swin_tiny_patch4_window7_224", img_size=SIZE, window_size=4, embed_dim=24, depths=(2, 2, 2)),
        images,
    ),
    "ConvNeXt": (of_timm("convnext_atto", drop_path_rate=0.2, depths=(1, 1, 2, 1)), images),
    "EfficientNet": (partial(EfficientNet, EFFICIENT_BLOCKS, dropout=0.2, num_classes=5), images),
    "MobileNet": (partial(MobileNetV3, MOBILE_BLOCKS, last_channel=32, num_classes=5), images),
    "MLP-Mixer": (partial(MlpMixer, 5, img_size=SIZE, patch_size=8, num_blocks=3, embed_dim=16), images),
    "ShuffleNet": (partial(torchvision.models.ShuffleNetV2, [1, 2, 1], [8, 16, 32, 64, 128], num_classes=5), images),
    "SqueezeNet": (of_torchvision("squeezenet1_1"), images),
    "two inputs": (TwoInputs, two_inputs),
    "GPT-2": (
        of_transformers(
            "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, vocab_size=11, n_positions=8, use_cache=False
        ),
        words("input_ids"),
    ),
    "BERT": (of_transformers("BertForMaskedLM", **WORDS), words("input_ids", "attention_mask")),
    "T5": (
        of_transformers(
            "T5ForConditionalGeneration",
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            vocab_size=11,
            use_cache=False,
        ),
        words("input_ids", "decoder_input_ids"),
    ),
    "Llama": (of_transformers("LlamaForCausalLM", **WORDS, use_cache=False), words("input_ids")),
    "ViT of transformers": (
        of_transformers("ViTForImageClassification", **SIZES, image_size=SIZE, patch_size=8, num_labels=5),
        lambda batch: {"pixel_values": images(batch)},
    ),
    "numbered examples": (
        Numbered,
        lambda batch: torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch)),
    ),
    "in place": (InPlace, lambda batch: torch.randn(batch, 6, generator=torch.Generator().manual_seed(batch))),
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]().train()


def call(model: nn.Module, inputs: Any) -> Any:
    torch.manual_seed(7)
    return model(**inputs) if isinstance(inputs, dict) and not isinstance(model, nn.Sequential) else model(inputs)


def tensors_of(nest: Any) -> Iterator[Tensor]:
    values = nest.values() if isinstance(nest, dict) else [nest]
    return (value for value in values if value is not None)
