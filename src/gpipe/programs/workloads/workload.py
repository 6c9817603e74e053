"""What `build` needs from a family of models and its data."""

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

_FINE_TUNING = 0xF17E  # separates the seeds of a fine-tuned model from those of a new one


@dataclass(frozen=True)
class Workload(ABC):
    """Builds, from a run's settings, all that depends on the kinds of model and data.

    Attributes:
        examples: what examples are called, in the plural.
        has_batch_norm: whether the model has batch norms.
        varies_in_length: whether the length of examples varies between mini-batches.
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
        """The drop-path rate at the end of training; None for a model without drop-path."""
        return None

    @property
    def loss_weight(self) -> LossWeight | None:
        """Computes the weight of a micro-batch in the loss; None is its number of examples."""
        return None

    @property
    def prepare_inputs(self) -> Callable[[Any], Any] | None:
        """Prepares a micro-batch's inputs on the first stage's device; None leaves them as they are."""
        return None

    @property
    def num_examples(self) -> int:
        """The number of examples in a mini-batch, over all replicas; the smallest if it depends on the data."""
        return self.run.trainer.batch_size

    @property
    def num_evaluated_examples(self) -> int:
        """The number of examples in one replica's evaluation mini-batch; the smallest if it depends on the data."""
        return self.run.trainer.evaluation.batch_size

    def check(self) -> None:  # noqa: B027 - our own models are checked with the settings
        """Refuse a model that its library does not have, or that does not take the data."""

    @abstractmethod
    def layers(self) -> nn.Sequential:
        """Describe the whole model on the meta device."""

    @abstractmethod
    def inputs(self, num_examples: int) -> Any:
        """Describe the inputs of `num_examples` examples on the meta device."""

    @abstractmethod
    def targets(self, num_examples: int) -> Any:
        """Describe the targets of `num_examples` examples on the meta device."""

    def evaluated_targets(self, num_examples: int) -> Any:
        """Describe the targets of `num_examples` evaluation examples on the meta device."""
        return self.targets(num_examples)

    @abstractmethod
    def loss(self) -> LossFunction:
        """Return the loss of a micro-batch."""

    def make_metrics(self) -> Metrics:
        """Return the metrics of an evaluation."""
        return EvaluationMetrics()

    @abstractmethod
    def train_loader(self, pipeline: Pipeline, *, pin_memory: bool) -> Loader:
        """Return the loader of the training data; each mini-batch is divided among the replicas.

        pin_memory: whether the data go to a GPU.
        """

    @abstractmethod
    def evaluation_loaders(self, pipeline: Pipeline, *, pin_memory: bool) -> Mapping[str, Loader]:
        """Return the loaders of the evaluation data by name.

        Every replica gets loaders of all data, because `evaluate` divides them by mini-batch.
        """

    @property
    def model_names(self) -> Mapping[str, str] | None:
        """For a traced model, the library's name of each of the layers' tensors; None for other models."""
        return None

    def replaced(self, layers: nn.ModuleDict, saved: Mapping[str, tuple[int, ...]]) -> Collection[str]:
        """Return the names of the tensors in a stage's layers that fine-tuning draws anew.

        These are the softmax layers', which belong to one set of classes.

        Args:
            layers: the stage's.
            saved: the shapes of the weights to start from, by the names that an export gives them.
        """
        return softmax_names(layers)

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes by label, which checkpoints store; None if labels have no names."""
        return None

    def keep(self, folder: Path | None) -> dict[str, str]:
        """Write into the run's folder what programs that use its checkpoints need; None writes nothing.

        Returns what checkpoints store about it, by name.
        """
        return {}

    def warnings(self) -> Sequence[str]:
        """Return sentences on what the user should know about the data."""
        return ()
