"""The settings of optimisation, evaluation and tracking."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from gpipe.config.checks import above, at_least, fixed, optional_at_least, rate, require


class Decay(Enum):
    """The learning rate's curve after the warm-up."""

    exponential = "exponential"
    cosine = "cosine"
    inverse_square_root = "inverse_square_root"
    constant = "constant"


class Autocast(Enum):
    """The precision of products and convolutions; weights are float32 in any case."""

    none = "none"
    bfloat16 = "bfloat16"


class TrackingMode(Enum):
    """What Weights & Biases does; metrics.jsonl is written in any case."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass
class OptimizerConfig:
    """What all optimisers share.

    times_batch_size: true means that the peak learning rate is learning_rate x trainer.batch_size.
    weight_decay: of kernels only. clip_norm: of the gradients of all stages together; null clips nothing.
    """

    name: str = MISSING
    learning_rate: float = MISSING
    times_batch_size: bool = MISSING
    weight_decay: float = MISSING
    clip_norm: float | None = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        above("optimizer.learning_rate", self.learning_rate, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if self.clip_norm is not None:
            above("optimizer.clip_norm", self.clip_norm, 0)


@dataclass
class RMSPropConfig(OptimizerConfig):
    """RMSProp as TensorFlow has it: epsilon inside the root."""

    name: str = "rmsprop"
    decay: float = MISSING
    momentum: float = MISSING
    epsilon: float = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        super().__post_init__()
        fixed("optimizer.name", self.name, "rmsprop", "optimizer")
        rate("optimizer.decay", self.decay)
        rate("optimizer.momentum", self.momentum)
        above("optimizer.epsilon", self.epsilon, 0)


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with Nesterov momentum."""

    name: str = "sgd"
    momentum: float = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        super().__post_init__()
        fixed("optimizer.name", self.name, "sgd", "optimizer")
        rate("optimizer.momentum", self.momentum)


@dataclass
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay."""

    name: str = "adamw"
    beta1: float = MISSING
    beta2: float = MISSING
    epsilon: float = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        super().__post_init__()
        fixed("optimizer.name", self.name, "adamw", "optimizer")
        rate("optimizer.beta1", self.beta1)
        rate("optimizer.beta2", self.beta2)
        above("optimizer.epsilon", self.epsilon, 0)


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Adafactor: a row and a column of second moments a kernel, in place of two numbers a parameter.

    decay: exponent of the second moments' decay. epsilon: the least root mean square by which a parameter's step is
    scaled. clip_threshold: the most root mean square of an update.
    """

    name: str = "adafactor"
    decay: float = MISSING
    epsilon: float = MISSING
    clip_threshold: float = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        super().__post_init__()
        fixed("optimizer.name", self.name, "adafactor", "optimizer")
        require(0 < self.decay <= 1, "optimizer.decay", self.decay, "an exponent in (0, 1]")
        above("optimizer.epsilon", self.epsilon, 0)
        above("optimizer.clip_threshold", self.clip_threshold, 0)


@dataclass
class ScheduleConfig:
    """The learning rate over time: a linear warm-up, then a curve; decay_* belong to the exponential one.

    warm_up_steps: in place of warm_up_epochs, which is 0 then; null is those.
    """

    name: Decay = MISSING
    warm_up_epochs: float = MISSING
    warm_up_steps: int | None = MISSING
    decay_rate: float = MISSING
    decay_epochs: float = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        at_least("schedule.warm_up_epochs", self.warm_up_epochs, 0)
        optional_at_least("schedule.warm_up_steps", self.warm_up_steps, 0)
        one = self.warm_up_steps is None or self.warm_up_epochs == 0
        require(one, "schedule.warm_up_epochs", self.warm_up_epochs, "0 where schedule.warm_up_steps is set")
        require(0 < self.decay_rate <= 1, "schedule.decay_rate", self.decay_rate, "a factor in (0, 1]")
        above("schedule.decay_epochs", self.decay_epochs, 0)


@dataclass
class EmaConfig:
    """The moving average of weights and statistics that is evaluated; decay null: no average, the weights themselves.

    warm_up: true forgets the initial weights faster, for runs of few steps.
    """

    decay: float | None = MISSING
    warm_up: bool = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        if self.decay is not None:
            rate("ema.decay", self.decay)


@dataclass
class TrackingConfig:
    """Where Weights & Biases keeps the run."""

    mode: TrackingMode = MISSING
    project: str = MISSING


class Resume(Enum):
    """Whether the same command again goes on in the folder of the run that it left unfinished."""

    auto = "auto"
    never = "never"


class NonFinite(Enum):
    """What a loss or gradient norm that is no finite number does: it ends the run, or its mini-batch is left out."""

    stop = "stop"
    skip = "skip"


@dataclass
class TrainerConfig:
    """The length of training, its precision, and what it leaves behind.

    batch_size: examples of a whole mini-batch, N, over all replicas; of translation, tokens, as is
        evaluation_batch_size: sentences times the longest source or target among them.
    max_steps: ends training early; null is no limit.
    num_untimed_steps: of a session's first, whose time is left out of the speed that is reported.
    evaluate_every_epochs, evaluate_every_steps: where either is given the end of training is evaluated too; null for
        both is never, not even then.
    patience: evaluations in a row without a smaller loss after which training ends; null waits for its length.
    save_every_steps: the end of training is saved in any case; null is only that; else also each evaluation whose loss
        is the least so far, which stays beside the newest keep_checkpoints. keep_checkpoints: null saves none at all.
    timeline_every_steps: null is never.
    autocast, evaluation_autocast: the precision in training and in evaluation.
    max_hours: after which, counted from the start of the process, the run is saved and stops; null is no limit.
    non_finite: whether a loss or gradient norm that is not finite ends the run, or up to max_skipped_steps of its
        mini-batches are left out.
    resume: auto goes on in the folder of the newest unfinished run of the same settings. resume_from: a checkpoint's
        folder, for a run of its own; null starts anew. dry_run: true prints the plan and stops.
    """

    num_epochs: int = MISSING
    max_steps: int | None = MISSING
    batch_size: int = MISSING
    evaluation_batch_size: int = MISSING
    label_smoothing: float = MISSING
    num_untimed_steps: int = MISSING
    evaluate_every_epochs: int | None = MISSING
    evaluate_every_steps: int | None = MISSING
    patience: int | None = MISSING
    save_every_steps: int | None = MISSING
    keep_checkpoints: int | None = MISSING
    timeline_every_steps: int | None = MISSING
    autocast: Autocast = MISSING
    evaluation_autocast: Autocast = MISSING
    channels_last: bool = MISSING
    compile: bool = MISSING
    max_hours: float | None = MISSING
    non_finite: NonFinite = MISSING
    max_skipped_steps: int = MISSING
    resume: Resume = MISSING
    resume_from: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        for name in ("num_epochs", "batch_size", "evaluation_batch_size"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in (
            "max_steps", "evaluate_every_epochs", "evaluate_every_steps", "patience", "save_every_steps",
            "keep_checkpoints", "timeline_every_steps",
        ):  # fmt: skip
            optional_at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.num_untimed_steps", self.num_untimed_steps, 0)
        at_least("trainer.max_skipped_steps", self.max_skipped_steps, 0)
        if self.max_hours is not None:
            above("trainer.max_hours", self.max_hours, 0)
        can_save = self.keep_checkpoints is not None or self.save_every_steps is None
        require(
            can_save, "trainer.save_every_steps", self.save_every_steps, "null where trainer.keep_checkpoints is null"
        )
        rate("trainer.label_smoothing", self.label_smoothing)
