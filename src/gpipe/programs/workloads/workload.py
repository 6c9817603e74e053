"""What `build` asks of a family of models and of its data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from gpipe.config import RunConfig
from gpipe.models import softmax_names
from gpipe.pipeline.engine import Pipeline
from gpipe.pipeline.loss import LossFunction, LossWeight
from gpipe.pipeline.randomness import derive_seed
from gpipe.training.evaluation import EvaluationMetrics, Metrics
from gpipe.training.loader import Loader

_FINE_TUNING = 0xF17E  # keeps the seeds of a model that begins with other weights apart from those of a new model


@dataclass(frozen=True)
class Workload(ABC):
    """Builds, from the settings of a run, all that depends on the kind of model and of data.

    Attributes:
        examples: what they are called, in the plural.
        has_batch_norm: whether the model has batch norms.
        varies_in_length: whether the examples of one mini-batch are longer than those of another.
    """

    run: RunConfig
    examples: ClassVar[str]
    has_batch_norm: ClassVar[bool] = False
    varies_in_length: ClassVar[bool] = False

    @property
    def model_seed(self) -> int:
        """The seed of the model's initial weights and masks.

        The run that `init_from` names may have the same seed. Its features were trained with the softmax layer that
        this seed drew, so a softmax layer that replaces it is drawn from another seed.
        """
        return self.run.seed if self.run.init_from is None else derive_seed(_FINE_TUNING, self.run.seed)

    @property
    def final_drop_path(self) -> float | None:
        """The drop-path rate at the end of training, None for a model without drop-path."""
        return None

    @property
    def loss_weight(self) -> LossWeight | None:
        """How much a micro-batch counts; None: by its number of examples."""
        return None

    @property
    def prepare_inputs(self) -> Callable[[Any], Any] | None:
        """What happens to the inputs of a micro-batch on the first stage's device; None: nothing."""
        return None

    @property
    def num_examples(self) -> int:
        """How many examples a mini-batch has, of all replicas; the fewest where that depends on the data."""
        return self.run.trainer.batch_size

    @property
    def num_evaluated_examples(self) -> int:
        """How many examples a mini-batch of an evaluation has, of one replica; the fewest where that depends."""
        return self.run.trainer.evaluation.batch_size

    def check(self) -> None:  # noqa: B027 - our own models are checked with the settings
        """Refuse a model that another library does not make, or that does not take the data."""

    @abstractmethod
    def layers(self) -> nn.Sequential:
        """Describe the whole model on the meta device."""

    @abstractmethod
    def inputs(self, num_examples: int) -> Any:
        """Describe the inputs of so many examples on the meta device."""

    @abstractmethod
    def targets(self, num_examples: int) -> Any:
        """Describe the targets of so many examples on the meta device."""

    def evaluated_targets(self, num_examples: int) -> Any:
        """Describe the targets of so many examples of an evaluation on the meta device."""
        return self.targets(num_examples)

    @abstractmethod
    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""

    def make_metrics(self) -> Metrics:
        """Return what measures an evaluation set."""
        return EvaluationMetrics()

    @abstractmethod
    def train_loader(self, pipeline: Pipeline, *, pin_memory: bool) -> Loader:
        """Return the loader of the training data, of which each mini-batch is shared out over the replicas.

        pin_memory: they go to a GPU.
        """

    @abstractmethod
    def evaluation_loaders(self, pipeline: Pipeline, *, pin_memory: bool) -> Mapping[str, Loader]:
        """Return the loaders of the evaluation data by name.

        `evaluate` shares the data out by mini-batches, so each replica is given all of them.
        """

    @property
    def model_names(self) -> Mapping[str, str] | None:
        """Of a model that became layers, the name of each of their tensors in the model; None for other models."""
        return None

    def replaced(self, layers: nn.ModuleDict, saved: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """Return the names, of a stage's layers, of the tensors that a model begun with other weights draws anew.

        The softmax layers belong to one set of classes. saved: the shapes of the other weights, by the names that an
        export gives them.
        """
        return softmax_names(layers)

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes by label, which checkpoints remember; None where labels have no names."""
        return None

    def keep(self, folder: Path | None) -> dict[str, str]:
        """Leave in the run's folder what programs that use its checkpoints need; None leaves nothing.

        Returns what checkpoints remember of it, by name.
        """
        return {}

    def warnings(self) -> Sequence[str]:
        """Return what the user should know of the data, a sentence each."""
        return ()
