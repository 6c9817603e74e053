"""A tiny translation model in float64, for the tests of this folder."""

import torch
from torch import Tensor, nn

from gpipe.models import translation_transformer

VOCABULARY = 60
END = 2


class Favour(nn.Module):
    """Make all but a few tokens impossible."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def forward(self, states: Tensor) -> Tensor:
        """Change the logits of all but END and `num_tokens` tokens from 4 on."""
        others = torch.ones(states.shape[-1], dtype=torch.bool)
        others[[END, *range(4, 4 + self.num_tokens)]] = False
        return states.masked_fill(others, -torch.inf)


def tiny_layers(seed: int = 0, *, sharpness: float = 3.0) -> nn.Sequential:
    """Two layers each; weights scaled up by `sharpness`, so that probabilities differ with the past."""
    torch.manual_seed(seed)
    layers = translation_transformer(
        2, 24, 2, vocabulary_size=VOCABULARY, model_size=16, head_size=6, scale_feedforward=False, tied="none"
    ).double()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(sharpness if parameter.ndim > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
        layers[-1].weight[END] *= 4  # so that some translations end early
    return layers.eval()


def sentences(num_sentences: int, seed: int = 0, longest: int = 13) -> list[list[int]]:
    """Random tokens of different lengths, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_sentences,), generator=generator).tolist()
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def log_probabilities(layers: nn.Sequential, source: list[int], target: list[int]) -> Tensor:
    """Return those of every token at every position of `target` and behind it, by the plain layers at once."""
    inputs = torch.tensor([[*source, END]]), torch.tensor([[END, *target]])
    logits: Tensor = layers(inputs)
    return logits[0].log_softmax(dim=-1)


def score(layers: nn.Sequential, source: list[int], target: list[int], length_penalty: float = 1.0) -> float:
    """Return the normalised score of a whole translation, END included."""
    found = log_probabilities(layers, source, target)
    tokens = [*target, END]
    return float(found[torch.arange(len(tokens)), tokens].sum()) / len(tokens) ** length_penalty
