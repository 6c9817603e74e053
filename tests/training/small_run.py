"""A small network, its data and its trainer: what the tests of checkpoints and of the trainer run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gpipe.checkpoint.content import Content, Kinds
from gpipe.checkpoint.manifest import Manifest, Position
from gpipe.checkpoint.read import load_checkpoint, load_weights
from gpipe.checkpoint.saver import Saver
from gpipe.pipeline.batch_norm import convert_batch_norm
from gpipe.pipeline.engine import Pipeline
from gpipe.training.checkpoints import get_tensors, wrap_optimizer
from gpipe.training.ema import Ema
from gpipe.training.learning_rate import exponential
from gpipe.training.loader import number_batches
from gpipe.training.losses import ClassificationLoss
from gpipe.training.optimizers import build_optimizer, optimizer_state
from gpipe.training.progress import Progress
from gpipe.training.tracking import Tracker
from gpipe.training.trainer import Trainer

NUM_LAYERS = 6
NUM_CLASSES = 6


class RandomImages:
    """A loader of made-up images whose class shows; the order is a function of the epoch, the last batch is smaller."""

    def __init__(self, num_images: int = 22, batch_size: int = 6, *, shuffle: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        self.labels = torch.randint(NUM_CLASSES, (num_images,), generator=generator)
        self.images = torch.randn(num_images, 1, 6, 6, generator=generator)
        self.images[torch.arange(num_images), 0, self.labels, :] += 2.0
        self.batch_size, self.shuffle = batch_size, shuffle
        self.batch_numbers: Sequence[int] | None = None
        self.epoch, self.wait_seconds = 0, 0.0
        self.num_fetched, self.num_replaced, self.num_closed = 0, 0, 0

    def close(self) -> None:
        self.num_closed += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from its first mini-batch on."""
        self.epoch, self.batch_numbers = epoch, None

    def __len__(self) -> int:
        return math.ceil(len(self.labels) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor]]:
        order = torch.arange(len(self.labels))
        if self.shuffle:
            order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(self.epoch))
        self.wait_seconds = 0.0
        parts = order.split(self.batch_size)
        for indices in (parts[number] for number in number_batches(self)):
            self.num_fetched += 1
            self.wait_seconds += 0.25
            yield self.images[indices], self.labels[indices]


def small_layers(num_classes: int = NUM_CLASSES, width: int = 8) -> nn.Sequential:
    """Six layers with batch norm and dropout; the third has no parameters."""
    with torch.device("meta"):
        layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
            nn.Sequential(nn.ReLU(), nn.Dropout(0.2)),
            nn.Flatten(),
            nn.Linear(64, width),
            nn.Sequential(nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(width, num_classes),
        )
    converted = convert_batch_norm(layers)
    assert isinstance(converted, nn.Sequential)
    return converted


@dataclass
class SmallRun:
    """What a training is made of."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    ema: Ema

    def train(self, num_steps: int, before_update: Callable[[], None] = lambda: None) -> None:
        """Make a few updates."""
        loader = RandomImages()
        for _, batch in zip(range(num_steps), loader, strict=False):
            self.optimizer.zero_grad(set_to_none=True)
            self.pipeline.train_step(batch)
            before_update()
            self.optimizer.step()
            self.ema.update(self.pipeline.step)

    def model(self, *, with_ema: bool = True) -> Kinds:
        """What checkpoints have of the layers."""
        return get_tensors(self.pipeline, self.ema if with_ema else None)

    def save(
        self,
        folder: Path,
        position: Position,
        *,
        with_ema: bool = True,
        keep: int = 3,
        is_best: bool = False,
        **settings: Any,
    ) -> Path:
        """Save everything, and wait until it is there."""
        saver = Saver(folder, self.pipeline, keep=keep)
        path = saver.save(self.content(position, with_ema=with_ema, **settings), is_best=is_best)
        saver.wait()
        return path

    def content(self, position: Position, *, with_ema: bool = True, **settings: Any) -> Content:
        """What goes into a checkpoint."""
        return Content(position, self.model(with_ema=with_ema), wrap_optimizer(self.optimizer), **settings)

    def load(self, path: Path) -> Manifest:
        """Load everything."""
        return load_checkpoint(path, self.pipeline, self.model(), wrap_optimizer(self.optimizer))

    def load_weights_alone(self, path: Path) -> Manifest:
        """Load neither averages nor the optimiser's state."""
        return load_checkpoint(path, self.pipeline, self.model(with_ema=False))

    def begin(self, path: Path, **settings: Any) -> None:
        """Begin with the weights and averages of another run."""
        load_weights(path, self.pipeline, self.model(), **settings)

    def tensors(self) -> dict[str, Tensor]:
        """Copy every number of the training state, by kind and name."""
        kinds = {
            "weights": self.pipeline.layers.state_dict(prefix="layers."),
            "ema": self.ema.state(),
            "optimizer": optimizer_state(self.optimizer),
        }
        return {f"{kind}: {name}": value.clone() for kind, part in kinds.items() for name, value in part.items()}


def assert_equal(run: SmallRun, expected: Mapping[str, Tensor]) -> None:
    """Compare a run's tensors with others, bit by bit and name by name."""
    found = run.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def small_run(
    partitions: Sequence[int] = (NUM_LAYERS,),
    *,
    seed: int = 0,
    optimizer: str = "rmsprop",
    order: Mapping[str, Any] = MappingProxyType({}),
    **sizes: int,
) -> SmallRun:
    """Build a pipeline of the small network, its optimiser and average; `order` is its mesh, its schedule and so on."""
    torch.set_num_threads(1)
    loss = ClassificationLoss(label_smoothing=0.1)
    pipeline = Pipeline(small_layers(**sizes), loss, list(partitions), num_microbatches=2, seed=seed, **order)
    settings = {"epsilon": 1.0} if optimizer == "rmsprop" else {}
    built = build_optimizer(optimizer, pipeline.named_parameters(), 0.01, weight_decay=1e-3, **settings)
    return SmallRun(pipeline, built, Ema(pipeline.layers, 0.9))


def small_trainer(folder: Path, partitions: Sequence[int] = (2, 4), **settings: Any) -> Trainer:
    """Build a trainer of 3 epochs with 4 mini-batches each, whose log and checkpoints go to `folder`."""
    names = "mesh", "schedule", "stages_per_device", "devices", "timeout_seconds"
    order = {name: settings.pop(name) for name in names if name in settings}
    run = small_run(partitions, order=order)
    defaults = {
        "pipeline": run.pipeline,
        "optimizer": run.optimizer,
        "ema": run.ema,
        "learning_rate": exponential(0.02, decay_rate=0.9, decay_steps=3, warm_up_steps=2),
        "train_loader": RandomImages(),
        "evaluation_loaders": {"test": RandomImages(15, 4, shuffle=False)},
        "num_epochs": 3,
        "tracker": Tracker(folder, mode="disabled"),
        "progress": Progress(12, 3, enabled=False),
        "seed": 0,
        "max_gradient_norm": 1.0,
        "checkpoint_folder": folder / "checkpoints",
    }
    return Trainer(**{**defaults, **settings})
