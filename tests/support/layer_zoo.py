"""A zoo of layers, as strangers write them, whose sequences can be drawn at random.

Each takes any payload and works on its main tensor, [n, 4, 6]. A payload is that tensor alone, or a dict with it under
"main" and with constants, of which some layers make use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gpipe
import gpipe._compat.torchvision  # before timm
from gpipe.pipeline.layers.generators import preserved_generators
from gpipe.pipeline.randomness import seed_generators

# isort: split
from timm.layers import DropPath, EvoNorm2dB0, LayerScale

LENGTH, SIZE, NUM_CLASSES = 4, 6, 5


class On(nn.Module):
    """Applies a module or a function to the main tensor, in float32 as far as autocast lets it; the rest passes by."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, payload: Any) -> Any:
        if isinstance(payload, Tensor):
            return self.inner(payload.float())
        return payload | {"main": self.inner(payload["main"].float())}


class AsImage(nn.Module):
    """Shows a module the sequence as an image of four channels, [n, 4, 2, 3]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(-1, LENGTH, 2, 3)).reshape(x.shape)


class First(nn.Module):
    """The first output of a module that has several, such as a recurrent one, narrowed where it is too wide."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0][..., :SIZE]


class Lstm(nn.LSTM):
    """torch's, in float32 on a processor without AVX-512: autocast asks oneDNN for kernels that it does not have there.

    The plain model fails there too.
    """

    def forward(self, x: Tensor) -> Tensor:
        has_kernels = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        with nullcontext() if has_kernels else torch.autocast("cpu", enabled=False):
            return super().forward(x)


class Cell(nn.Module):
    """A recurrent cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0])]
        for step in x.unbind(1):
            states.append(self.cell(step, states[-1]))
        return torch.stack(states[1:], 1)


class SelfAttention(nn.Module):
    """torch's attention with a mask that it makes itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Constants(nn.Module):
    """Adds constants to the payload: masks, a rotary table, integers, None, and a tensor in two places."""

    def forward(self, payload: Any) -> Any:
        main = payload if isinstance(payload, Tensor) else payload["main"]
        angles = torch.arange(LENGTH)[:, None] * torch.tensor([1.0, 0.1, 0.01])
        bias = torch.linspace(-1, 1, LENGTH * LENGTH).view(LENGTH, LENGTH)
        return {
            "main": main,
            "bias": bias,
            "rotary": (angles.cos(), angles.sin()),
            "more": [None, {"positions": torch.arange(LENGTH), "seen": bias > 0, "again": bias}, []],
        }


class Attend(nn.Module):
    """Attention with the payload's bias and rotary table, where it has them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, payload: Any) -> Any:
        has_constants = isinstance(payload, dict) and "bias" in payload
        main = (payload if isinstance(payload, Tensor) else payload["main"]).float()
        query, key, value = self.project(main).float()[:, None].chunk(3, -1)
        bias = None
        if has_constants:
            bias, (cosine, sine) = payload["bias"], payload["rotary"]
            query, key = (
                torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)
                for a, b in (query.chunk(2, -1), key.chunk(2, -1))
            )
        main = main + F.scaled_dot_product_attention(query, key, value, attn_mask=bias)[:, 0]
        return main if isinstance(payload, Tensor) else payload | {"main": main}


class Where(nn.Module):
    """Uses the payload's integers and booleans, where it has them, and hands on less."""

    def forward(self, payload: Any) -> Any:
        if isinstance(payload, Tensor) or "more" not in payload:
            return payload
        more = payload["more"][1]
        main = torch.where(more["seen"].any(1)[:, None], payload["main"], payload["main"] * 0.5)
        return {"main": main[:, more["positions"]], "nothing": None}


class Halves(nn.Module):
    """Hands on a tensor as two views, neither of which begins on a line of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 30)

    def forward(self, payload: Any) -> Any:
        main = payload if isinstance(payload, Tensor) else payload["main"]
        left, right = self.linear(main.float()).chunk(2, -1)
        return {"main": left[..., 3:9], "right": right}


class Overlapping(nn.Module):
    """Hands on windows of a tensor that overlap; the first one does not begin on a line of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 5)

    def forward(self, payload: Any) -> Any:
        main = payload if isinstance(payload, Tensor) else payload["main"]
        return {"main": main, "right": self.linear(main.float()).flatten(1)[:, 3:].unfold(1, 8, 3)}


class Joined(nn.Module):
    """Adds what other layers left in the payload."""

    def forward(self, payload: Any) -> Any:
        if isinstance(payload, Tensor) or "right" not in payload:
            return payload
        right = payload["right"]
        return payload["main"] + right.softmax(-1)[..., :SIZE] * (right * right).sum(-1, keepdim=True)


class Spectrum(nn.Module):
    """Hands on complex numbers, conjugated lazily, and takes them back where they are."""

    def forward(self, payload: Any) -> Any:
        if isinstance(payload, dict) and "spectrum" in payload:
            return payload["main"] + torch.fft.irfft(payload["spectrum"], n=SIZE)
        main = (payload if isinstance(payload, Tensor) else payload["main"]).float()
        return {"main": main, "spectrum": torch.fft.rfft(main).conj()}


class ComplexWeight(nn.Module):
    """Multiplies by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.rfft(x) * self.weight).flatten(-2)[..., :SIZE]


class ComplexLinear(nn.Module):
    """A fully connected layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(self.linear(torch.fft.rfft(x)), n=SIZE)


class Residual(nn.Module):
    """Adds what a module makes of a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(nn.Module):
    """Runs a module inside of torch's own checkpointing."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad and self.use_reentrant:  # torch warns: its backward would not run
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class CheckpointedInTwo(nn.Sequential):
    """Runs a sequence as two checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self), 2, x, use_reentrant=False)


class Averages(nn.Module):
    """Moves buffers in three ways, and uses them and one that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("silent", torch.zeros(SIZE))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("constant", torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            self.silent.data.lerp_(x.detach().mean((0, 1)), 0.1)
            self.count = self.count + 1
        return self.linear(x).float() * (1 + self.mean + self.silent) / (self.constant + self.count)


class Codebook(nn.Module):
    """Replaces vectors by the nearest of a codebook that follows them (VQ-VAE), with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(3, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x.detach()[..., None, :] - self.codes).square().sum(-1).argmin(-1)
        if self.training:
            chosen = F.one_hot(nearest.flatten(), 3).float()
            means = chosen.t() @ x.detach().flatten(0, 1) / chosen.sum(0).clamp(min=1)[:, None]
            self.codes.mul_(0.9).add_(means.float(), alpha=0.1)
        return x + (self.codes[nearest] - x).detach()


class Counted(nn.Module):
    """Grows with the number of forwards, which it counts outside of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not gpipe.is_recomputing():
            self.count += 1
        return x


class Differentiates(nn.Module):
    """Follows the gradient of an energy, which it finds in its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.how = how

    def energy(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "torch.func":
            return x + torch.func.grad(self.energy)(x)
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return x + gradient


class Cube(torch.autograd.Function):
    """An operation with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = x.detach().abs().mean()
        return x**3 / 10

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 0.3 * x * x + 0 * ctx.scale


class Experts(nn.Module):
    """Sends each vector to the best of three experts, of which some may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, 3)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).float().softmax(-1).max(-1)
        outputs = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_add(0, rows, expert(flat[rows]).float() * weights[rows, None])
        return outputs.view_as(x)


class Bins(nn.Module):
    """Looks numbers up in a table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        words = torch.bucketize(x.detach().mean(-1), torch.linspace(-1, 1, 6))
        if isinstance(self.table, nn.EmbeddingBag):
            return x + self.table(words)[:, None]
        return x + self.table(words)


class Gaussian(nn.Module):
    """A parametrisation: weights with a bell over them."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.exp(-weight.square())


class Tied(nn.Module):
    """Multiplies by a matrix that other layers have too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * F.linear(x, self.weight)


class Sometimes(nn.Module):
    """Uses its weight only in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if float(x.detach().sum()) > 0 else x


class Unused(nn.Linear):
    """Has a parameter that nothing depends on."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.unused = nn.Parameter(torch.ones(3))


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Pairs(nn.Module):
    """Multiplies a tensor by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(SIZE, SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x) * 0.1


class Skipped(nn.Module):
    """Leaves a module out, by a coin of Python's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else x + self.inner(x)


def half_frozen() -> nn.Module:
    layer = nn.Linear(SIZE, SIZE)
    layer.weight.requires_grad_(False)
    return layer


class Head(nn.Module):
    """Ends every sequence; a sum over what is left in the payload scales the scores, whose bits its strides decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LENGTH * SIZE, NUM_CLASSES)

    def forward(self, payload: Any) -> Tensor:
        main = payload if isinstance(payload, Tensor) else payload["main"]
        scores = self.linear(main.float().flatten(1)).float()
        is_left = isinstance(payload, dict) and "right" in payload
        return scores * payload["right"].float().sum((1, 2)).sigmoid()[:, None] if is_left else scores


def hooked(kind: str) -> nn.Module:
    """Return a layer with a hook."""
    layer = nn.Linear(SIZE, SIZE)
    if kind == "forward":
        layer.register_forward_hook(lambda _, args, output: output * 0.5 + args[0])
    elif kind == "before":
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    elif kind == "backward":
        layer.register_full_backward_hook(lambda _, into, __: (None if into[0] is None else into[0] * 0.5,))
    else:
        layer.weight.register_hook(lambda gradient: gradient * 0.5)
    return layer


def clipped(x: Tensor) -> Tensor:
    """Clip the gradient on its way back."""
    y = x * 1.5
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return (
        y.clone()
    )  # a hook of the very tensor that is returned would reach into a next layer with torch.autograd.grad


def quantised() -> nn.Module:
    """Return a layer that rounds as a quantised one will, in a range that it observes."""
    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=15)
    return nn.Sequential(nn.Linear(SIZE, SIZE), fake)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(SIZE, SIZE), "weight", amount=0.5)


def bell() -> nn.Module:
    layer = nn.Linear(SIZE, SIZE)
    parametrize.register_parametrization(layer, "weight", Gaussian())
    return layer


def spread(x: Tensor) -> Tensor:
    """Copy by index, in both directions."""
    order = torch.arange(SIZE - 1, -1, -1).expand(x.shape)
    return torch.zeros_like(x).scatter_add(-1, order, x) + x.gather(-1, order.flip(-1))


def dense() -> nn.Module:
    return nn.Linear(SIZE, SIZE)


def windows(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1)).unfold(-1, 3, 1).mean(-1)


def in_place(x: Tensor) -> Tensor:
    y = (x * 1.1).contiguous()
    y[:, 1:, ::2] += 0.5
    y.view(-1).tanh_()
    return y


KINDS: dict[str, Callable[[], nn.Module]] = {
    # plain ones
    "linear": lambda: On(dense()),
    "bilinear": lambda: On(Pairs()),
    "conv1d": lambda: On(nn.Conv1d(LENGTH, LENGTH, 3, padding=1)),
    "dilated conv1d": lambda: On(nn.Conv1d(LENGTH, LENGTH, 3, padding=2, dilation=2, groups=2)),
    "conv2d": lambda: On(AsImage(nn.Conv2d(LENGTH, LENGTH, 3, padding=1))),
    "depthwise": lambda: On(AsImage(nn.Conv2d(LENGTH, LENGTH, 3, padding=1, groups=LENGTH))),
    "transposed conv": lambda: On(AsImage(nn.ConvTranspose2d(LENGTH, LENGTH, 3, padding=1))),
    "channels last": lambda: On(AsImage(nn.Conv2d(LENGTH, LENGTH, 1).to(memory_format=torch.channels_last))),
    "pools": lambda: On(AsImage(nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)))),
    "upsample": lambda: On(AsImage(nn.Sequential(nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d((2, 3))))),
    "embedding": lambda: On(Bins(nn.Embedding(7, SIZE))),
    "embedding bag": lambda: On(Bins(nn.EmbeddingBag(7, SIZE, mode="sum"))),
    "prelu": lambda: On(nn.PReLU()),
    "glu": lambda: On(nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GLU())),
    "inplace relu": lambda: On(nn.Sequential(dense(), nn.ReLU(inplace=True), dense())),
    "layer scale": lambda: On(Residual(LayerScale(SIZE, 0.1))),
    # norms
    "batch norm": lambda: On(nn.BatchNorm1d(LENGTH)),
    "batch norm 2d": lambda: On(AsImage(nn.BatchNorm2d(LENGTH, momentum=None))),
    "batch norm without weights": lambda: On(nn.Sequential(dense(), nn.BatchNorm1d(LENGTH, affine=False))),
    "layer norm": lambda: On(nn.LayerNorm(SIZE)),
    "rms norm": lambda: On(nn.RMSNorm(SIZE)),
    "group norm": lambda: On(nn.GroupNorm(2, LENGTH)),
    "instance norm": lambda: On(nn.InstanceNorm1d(LENGTH, affine=True, track_running_stats=True)),
    "local response norm": lambda: On(nn.LocalResponseNorm(3)),
    "evo norm": lambda: On(AsImage(EvoNorm2dB0(LENGTH))),
    # recurrent ones and attention
    "lstm": lambda: On(First(Lstm(SIZE, SIZE, batch_first=True))),
    "two lstms": lambda: On(First(Lstm(SIZE, SIZE, 2, batch_first=True, dropout=0.3, bidirectional=True))),
    "gru": lambda: On(First(nn.GRU(SIZE, SIZE, batch_first=True))),
    "rnn": lambda: On(First(nn.RNN(SIZE, SIZE, batch_first=True))),
    "cell": lambda: On(Cell()),
    "self attention": lambda: On(SelfAttention()),
    "self attention with dropout": lambda: On(SelfAttention(0.3)),
    "encoder": lambda: On(nn.TransformerEncoderLayer(SIZE, 2, 8, 0.2, batch_first=True, norm_first=True)),
    "constants": Constants,
    "attend": Attend,
    "where": Where,
    # views, complex numbers, operations
    "halves": Halves,
    "overlapping": Overlapping,
    "joined": Joined,
    "spectrum": Spectrum,
    "complex weight": lambda: On(ComplexWeight()),
    "complex linear": lambda: On(ComplexLinear()),
    "transposed": lambda: On(Function(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))),
    "windows": lambda: On(Function(windows)),
    "in place": lambda: On(Function(in_place)),
    "spread": lambda: On(Function(spread)),
    "sorted": lambda: On(Function(lambda x: x.sort(-1).values + x.cumsum(1) * 0.1)),
    "distances": lambda: On(Function(lambda x: torch.cdist(x, x + 1) @ x * 0.1)),
    "expanded": lambda: On(Function(lambda x: x.mean(1, keepdim=True).expand_as(x) + 0 * x)),
    "clipped": lambda: On(Function(clipped)),
    "cube": lambda: On(Function(Cube.apply)),
    "detached": lambda: On(Function(lambda x: x * x.detach().sigmoid())),
    # hooks and parametrisations
    "forward hook": lambda: On(hooked("forward")),
    "hook before": lambda: On(hooked("before")),
    "backward hook": lambda: On(hooked("backward")),
    "hook of a weight": lambda: On(hooked("weight")),
    "weight norm": lambda: On(parametrizations.weight_norm(dense())),
    "spectral norm": lambda: On(parametrizations.spectral_norm(dense())),
    "old spectral norm": lambda: On(nn.utils.spectral_norm(dense())),
    "orthogonal": lambda: On(parametrizations.orthogonal(dense())),
    "bell": lambda: On(bell()),
    "pruned": lambda: On(pruned()),
    # checkpoints inside, gradients inside
    "checkpoint": lambda: On(Checkpointed(nn.Sequential(dense(), nn.Tanh(), nn.Dropout(0.3)))),
    "checkpointed norm": lambda: On(Checkpointed(nn.BatchNorm1d(LENGTH))),
    "checkpointed averages": lambda: On(Checkpointed(Averages())),
    "old checkpoint": lambda: On(Checkpointed(nn.Sequential(dense(), nn.BatchNorm1d(LENGTH)), use_reentrant=True)),
    "checkpoints in a row": lambda: On(CheckpointedInTwo(dense(), nn.Tanh(), dense(), nn.Dropout(0.2))),
    "autograd.grad": lambda: On(Differentiates("torch.autograd")),
    "torch.func": lambda: On(Differentiates("torch.func")),
    # of a state
    "averages": lambda: On(Averages()),
    "codebook": lambda: On(Codebook()),
    "quantised": lambda: On(quantised()),
    "counted": lambda: On(Counted()),
    "lazy linear": lambda: On(nn.LazyLinear(SIZE)),
    "lazy conv": lambda: On(nn.LazyConv1d(LENGTH, 3, padding=1)),
    # parameters that are shared, frozen, idle
    "tied": lambda: On(Tied(nn.Parameter(torch.randn(SIZE, SIZE) / 3))),
    "frozen": lambda: On(dense().requires_grad_(False)),
    "half frozen": lambda: On(half_frozen()),
    "sometimes": lambda: On(Sometimes()),
    "unused": lambda: On(Unused()),
    "experts": lambda: On(Experts()),
    # random ones
    "dropout": lambda: On(nn.Dropout(0.4)),
    "dropout 1d": lambda: On(nn.Dropout1d(0.4)),
    "alpha dropout": lambda: On(nn.AlphaDropout(0.2)),
    "drop path": lambda: On(Residual(nn.Sequential(dense(), DropPath(0.4)))),
    "rrelu": lambda: On(nn.RReLU()),
    "noise": lambda: On(Function(lambda x: x + 0.1 * torch.randn_like(x) * torch.empty_like(x).bernoulli_(0.5))),
    "gumbel": lambda: On(Function(lambda x: x * F.gumbel_softmax(x, hard=True))),
    "Python's generator": lambda: On(Function(lambda x: x * random.uniform(0.5, 1.5))),
    "numpy's generator": lambda: On(Function(lambda x: x * float(np.random.uniform(0.5, 1.5)))),
    "shuffled": lambda: On(Function(lambda x: x[:, torch.randperm(LENGTH)])),
    "stochastic depth": lambda: On(Skipped(dense())),
}


def build(kinds: Sequence[str], seed: int = 0) -> nn.Sequential:
    """Return the sequence, with a head, and weights that depend on the seed; lazy modules have theirs."""
    with preserved_generators([torch.device("cpu")]):
        seed_generators(seed)
        layers = nn.Sequential(*(KINDS[kind]() for kind in kinds), Head())
        tied = [layer.inner for layer in layers if isinstance(getattr(layer, "inner", None), Tied)]
        for other in tied[1:]:
            other.weight = tied[0].weight
        layers.eval()
        layers(torch.randn(2, LENGTH, SIZE))
        layers.train()
    gpipe.convert_batch_norm(layers)
    return layers
