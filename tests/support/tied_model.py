"""A model in which layers share parameters, trained by a pipeline and, as one plain model, without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe

NUM_WORDS, SIZE = 9, 6
TABLE = ("layers.0.weight", "layers.2.table", "layers.3.table", "layers.5.weight")
MATRIX = ("layers.1.inner.weight", "layers.4.1.weight")


class Mix(nn.Module):
    """Looks a state up in a table that is another layer's; has no way to fill it."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(x @ self.table.t()) @ self.table


class Block(nn.Module):
    """A linear layer below a name, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(x)))


def tied_layers(device: str = "cpu", *, dropout: float = 0.0) -> nn.Sequential:
    """Return six layers, of which 0, 2, 3 and 5 share a table, 1 and 4 a matrix but not its bias."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        embedding, block, last = nn.Embedding(NUM_WORDS, SIZE), Block(dropout), nn.Linear(SIZE, NUM_WORDS)
        behind = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))
        layers = nn.Sequential(embedding, block, Mix(embedding.weight), Mix(embedding.weight), behind, last).double()
    # Tied afterwards, as models do it: on the meta device `double` makes new parameters.
    layers[2].table = layers[3].table = layers[5].weight = layers[0].weight
    # And one that does not lie in memory row by row.
    layers[4][1].weight = layers[1].inner.weight = nn.Parameter(layers[1].inner.weight.detach().t())
    return layers


def mini_batch(step: int, num_examples: int = 7) -> tuple[Tensor, Tensor]:
    """Return words, and the words that should follow them."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(NUM_WORDS, (num_examples, 3), generator=generator)
    return words, (words * 2 + 1)[:, 0] % NUM_WORDS


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of the mean over the words."""
    return F.cross_entropy(outputs.mean(1), targets)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """How the model is cut and trained.

    Attributes:
        zeroed: after which steps the gradients are cleared and an update is made.
        max_norm: to which gradients are clipped before an update.
    """

    partitions: tuple[int, ...] = (6,)
    schedule: str = "gpipe"
    stages_per_device: int = 1
    rematerialize: str = "always"
    device: str = "cpu"
    dropout: float = 0.0
    num_steps: int = 3
    zeroed: tuple[int, ...] = (1, 2)
    max_norm: float | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd

    @property
    def num_devices(self) -> int:
        return len(self.partitions) // self.stages_per_device


@dataclass
class Outcome:
    """What a run left behind: by name, gradients after each step and the state at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def run(case: Case, mesh: Any = None, num_replicas: int = 1) -> Outcome:
    """Train in a pipeline; of several replicas each gets its share of the mini-batch."""
    pipeline = gpipe.Pipeline(
        tied_layers(case.device, dropout=case.dropout),
        loss,
        case.partitions,
        3,
        rematerialize=case.rematerialize,
        schedule=case.schedule,
        stages_per_device=case.stages_per_device,
        mesh=mesh,
        seed=3,
        timeout_seconds=10,
    )
    outcome = Outcome()
    optimizer = case.optimizer(pipeline.parameters())
    for step in range(case.num_steps):
        inputs, targets = (part.chunk(num_replicas)[pipeline.job.replica_index] for part in mini_batch(step))
        report = pipeline.train_step((inputs if pipeline.is_first else None, targets if pipeline.is_last else None))
        outcome.losses.append(report.loss)
        if case.max_norm is not None:
            outcome.norms.append(pipeline.clip_gradients(case.max_norm))
        outcome.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in pipeline.named_parameters()}
        )
        if step in case.zeroed:
            optimizer.step()
            optimizer.zero_grad()
    outcome.state = {f"layers.{name}": value.clone() for name, value in pipeline.layers.state_dict().items()}
    pipeline.close()
    return outcome


def run_plain(case: Case) -> Outcome:
    """Train the model as it is, with parameters that are shared."""
    layers, outcome = tied_layers(), Outcome()
    optimizer = case.optimizer(layers.parameters())
    for step in range(case.num_steps):
        inputs, targets = mini_batch(step)
        value = loss(layers(inputs), targets)
        value.backward()
        outcome.losses.append(value.item())
        if case.max_norm is not None:
            outcome.norms.append(nn.utils.clip_grad_norm_(layers.parameters(), case.max_norm).item())
        named = layers.named_parameters(remove_duplicate=False)
        outcome.gradients.append({f"layers.{n}": None if p.grad is None else p.grad.clone() for n, p in named})
        if step in case.zeroed:
            optimizer.step()
            optimizer.zero_grad()
    outcome.state = {f"layers.{name}": value.clone() for name, value in layers.state_dict().items()}
    return outcome


def assert_close(found: Outcome, expected: Outcome) -> None:
    """Compare all that a process has with the plain model's, parameter by parameter."""
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-12, atol=0)
    for step, gradients in enumerate(found.gradients):
        for name, gradient in gradients.items():
            other = expected.gradients[step][name]
            torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12, msg=lambda t, n=name: f"{n}: {t}")
    for name, value in found.state.items():
        other = expected.state[name]
        torch.testing.assert_close(value, other, rtol=0, atol=1e-11, msg=lambda t, n=name: f"{n}: {t}")


def assert_bitwise_equal(found: Outcome, expected: Outcome, what: str = "") -> None:
    """Compare all that a process has with another run's."""
    assert found.losses == expected.losses, what
    assert found.norms == expected.norms, what
    for step, gradients in enumerate(found.gradients):
        for name, gradient in gradients.items():
            other = expected.gradients[step][name]
            assert gradient is other is None or torch.equal(gradient, other), f"{what}, step {step}, {name}"
    for name, value in found.state.items():
        assert torch.equal(value, expected.state[name]), f"{what}, {name}"


def assert_copies_equal(outcomes: Iterable[Outcome]) -> None:
    """Check that all copies, in whatever process, got the same gradients and have the same values."""
    parts = list(outcomes)
    for step in range(len(parts[0].gradients)):
        gradients = {name: g for part in parts for name, g in part.gradients[step].items()}
        for names in (TABLE, MATRIX):
            assert all(torch.equal(gradients[name], gradients[names[0]]) for name in names)
    state = {name: value for part in parts for name, value in part.state.items()}
    for names in (TABLE, MATRIX):
        assert all(torch.equal(state[name], state[names[0]]) for name in names)
