"""Small networks of others as sequences of layers: of timm, torchvision, transformers and torch."""

from collections.abc import Sequence
from functools import partial

import gpipe._compat.torchvision

# isort: split

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from experiments.planned_memory.small_models import SmallModel, make_images, make_tokens, token_loss
from gpipe.pipeline.batch_norm import convert_batch_norm

_NUM_CLASSES, _VOCABULARY, _LENGTH, _WIDTH = 10, 200, 48, 96
Hidden = tuple[Tensor, Tensor, Tensor]


class Recurrent(nn.Module):
    """A recurrent layer that passes on its outputs, not its state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(_WIDTH, _WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run over the sequence: [batch, time, width] -> the same."""
        return self.cells(tokens)[0]


class Down(nn.Module):
    """Half of a U-Net's way down: keeps what it found for the way up."""

    def __init__(self, channels: int, new_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, new_channels, 3, padding=1), nn.InstanceNorm2d(new_channels))

    def forward(self, payload: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take an image, or what the layers before kept and the newest; return one more."""
        *kept, newest = payload if isinstance(payload, tuple) else (payload,)
        found = self.body(newest).relu()
        return *kept, found, F.max_pool2d(found, 2)


class Up(nn.Module):
    """The way up: joins what was kept last."""

    def __init__(self, channels: int, kept_channels: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(channels + kept_channels, kept_channels, 3, padding=1)

    def forward(self, payload: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Take what was kept and the newest; return one less."""
        *kept, newest = payload
        joined = torch.cat([F.interpolate(newest, scale_factor=2), kept.pop()], dim=1)
        found = self.body(joined).relu()
        return (*kept, found) if kept else found


class Start(nn.Module):
    """The embedding of a decoder with rotary positions, whose tables and mask travel with the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)

    def forward(self, tokens: Tensor) -> Hidden:
        """Tokens [batch, time] -> hidden states, an additive mask, the angles of the positions."""
        time = tokens.shape[1]
        mask = torch.full((time, time), float("-inf"), device=tokens.device).triu(1)
        angles = torch.outer(torch.arange(time, device=tokens.device), 10_000.0 ** -torch.linspace(0, 1, 12))
        return self.embedding(tokens), mask.expand(len(tokens), 1, time, time), angles.expand(len(tokens), time, 12)


class Decoder(nn.Module):
    """A layer as in Llama: RMS norms, rotary attention with a mask of floats, a gated feed-forward."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)])
        self.inner, self.outer = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gate, self.up = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False), nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, payload: Hidden) -> Hidden:
        """Attend and feed forward; mask and angles pass by."""
        hidden, mask, angles = payload
        split = self.inner(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = _rotate(split[0], angles), _rotate(split[1], angles)
        attended = F.scaled_dot_product_attention(query, key, split[2], attn_mask=mask)
        hidden = hidden + self.outer(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed)), mask, angles


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    sine, cosine = angles.sin()[:, None], angles.cos()[:, None]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class First(nn.Module):
    """Takes the hidden states of a decoder, and gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, payload: Hidden) -> Tensor:
        """Return logits: [batch, time, vocabulary]."""
        logits: Tensor = self.head(payload[0])
        return logits


class Patches(nn.Module):
    """The beginning of a vision transformer of timm: patches, positions, the class token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.patches, self.token, self.positions = model.patch_embed, model.cls_token, model.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        """Images -> tokens [batch, 1 + patches, width]."""
        found = self.patches(images)
        return torch.cat([self.token.expand(len(found), -1, -1), found], dim=1) + self.positions


class Pooled(nn.Module):
    """The end of a network of timm: a norm, a mean over positions or the first one, a linear layer."""

    def __init__(self, norm: nn.Module, head: nn.Module, *, takes_first: bool) -> None:
        super().__init__()
        self.norm, self.head, self.takes_first = norm, head, takes_first

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens -> logits."""
        found = self.norm(tokens)
        logits: Tensor = self.head(found[:, 0] if self.takes_first else found.mean(1))
        return logits


def make_strangers() -> list[SmallModel]:
    """Return the networks, with random weights."""
    torch.manual_seed(0)
    options = {"pretrained": False, "num_classes": _NUM_CLASSES}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, **options)
    mixer = timm.create_model("mixer_s16_224", img_size=64, **options)
    convnext = timm.create_model("convnext_atto", **options)
    efficient = timm.create_model("efficientnet_b0", **options)
    regnet = timm.create_model("regnetx_002", **options)
    resnet = torchvision.models.resnet18(num_classes=_NUM_CLASSES)
    dense = torchvision.models.densenet121(num_classes=_NUM_CLASSES)
    blocks = [block for stage in convnext.stages for block in (stage.downsample, *stage.blocks)]
    residual = [block for stage in (resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4) for block in stage]
    stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool)
    regular = [block for stage in (regnet.s1, regnet.s2, regnet.s3, regnet.s4) for block in stage.children()]
    language = {"vocab_size": _VOCABULARY, "tie_word_embeddings": False, "use_cache": False}
    llama = transformers.LlamaConfig(
        hidden_size=_WIDTH, intermediate_size=4 * _WIDTH, num_hidden_layers=4, num_attention_heads=4, **language
    )
    gpt = transformers.GPT2Config(n_embd=_WIDTH, n_layer=4, n_head=4, **language)
    unet = [Down(3, 16), Down(16, 32), Down(32, 64), nn.Identity(), Up(64, 64), Up(64, 32), Up(32, 16)]
    return [
        *(
            _of_text(f"{kind.__name__}, 4 layers", [nn.Embedding(_VOCABULARY, _WIDTH), *cells, head])
            for kind in (nn.LSTM, nn.GRU)
            for cells, head in [([Recurrent(kind) for _ in range(4)], nn.Linear(_WIDTH, _VOCABULARY))]
        ),
        _of_text("Llama, 4 layers", [Start(), *(Decoder() for _ in range(4)), First()]),
        _of_text("Llama of transformers", _trace(transformers.LlamaForCausalLM(llama))),
        _of_text("GPT-2 of transformers", _trace(transformers.GPT2LMHeadModel(gpt))),
        _of_images("U-Net", [*unet, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _NUM_CLASSES))]),
        _of_images("ViT", [Patches(vit), *vit.blocks, Pooled(vit.norm, vit.head, takes_first=True)]),
        _of_images("MLP-Mixer", [mixer.stem, *mixer.blocks, Pooled(mixer.norm, mixer.head, takes_first=False)]),
        _of_images("ConvNeXt", [convnext.stem, *blocks, convnext.head]),
        _of_images("ResNet-18", [stem, *residual, nn.Sequential(resnet.avgpool, nn.Flatten(), resnet.fc)]),
        _of_images(
            "EfficientNet-B0",
            [
                nn.Sequential(efficient.conv_stem, efficient.bn1),
                *(block for stage in efficient.blocks for block in stage),
                nn.Sequential(
                    efficient.conv_head, efficient.bn2, efficient.global_pool, nn.Flatten(), efficient.classifier
                ),
            ],
        ),
        _of_images("RegNetX", [regnet.stem, *regular, nn.Sequential(regnet.final_conv, regnet.head)]),
        _of_images(
            "DenseNet-121", [*dense.features, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), dense.classifier]
        ),
    ]


def _trace(model: nn.Module) -> Sequence[nn.Module]:
    return list(gpipe.as_layers(model, torch.zeros(4, _LENGTH, dtype=torch.int64)))


def _of_images(title: str, layers: Sequence[nn.Module]) -> SmallModel:
    return SmallModel(title, convert_batch_norm(nn.Sequential(*layers)), F.cross_entropy, make_images)


def _of_text(title: str, layers: Sequence[nn.Module]) -> SmallModel:
    make_batch = partial(make_tokens, _VOCABULARY, _LENGTH)
    return SmallModel(title, convert_batch_norm(nn.Sequential(*layers)), token_loss, make_batch)
