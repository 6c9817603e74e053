"""The settings of optimisation, evaluation and tracking."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from omegaconf import MISSING

from gpipe.config.checks import Section, at_least, kind, positive, rate, require, share

# The learning rate's curve after the warm-up.
Decay = StrEnum("Decay", ["exponential", "cosine", "inverse_square_root", "constant"])
# The precision of products and convolutions; weights are float32 in any case. auto is bfloat16 on a device with
# hardware for it, and none on others.
Autocast = StrEnum("Autocast", ["auto", "none", "bfloat16", "float16"])
# The precision of float32 products on a GPU: high rounds their factors to TF32, medium to bfloat16.
MatmulPrecision = StrEnum("MatmulPrecision", ["highest", "high", "medium"])
# Where the run is shown: offline and online are modes of Weights & Biases; metrics.jsonl is always written.
TrackingMode = StrEnum("TrackingMode", ["offline", "online", "tensorboard", "disabled"])
Resume = StrEnum("Resume", ["auto", "never"])  # whether repeating a command resumes the run that it left unfinished
# What happens after a loss or gradient norm that is not finite: the run stops, or its mini-batch is skipped.
NonFiniteAction = StrEnum("NonFiniteAction", ["stop", "skip"])


@dataclass
class OptimizerConfig(Section):
    """What all optimisers share.

    Attributes:
        learning_rate: the peak.
        times_batch_size: multiply the peak learning rate by trainer.batch_size.
        weight_decay: the decay of kernels only.
        clip_norm: the largest norm of the gradients of all stages together; null does not clip.
    """

    place: ClassVar[str] = "optimizer."
    name: str = MISSING
    learning_rate: float = positive()
    times_batch_size: bool = MISSING
    weight_decay: float = at_least(0)
    clip_norm: float | None = positive()

    @property
    def arguments(self) -> dict[str, Any]:
        """What the optimiser itself takes, besides the learning rate."""
        return self.values_but("name", "learning_rate", "times_batch_size", "clip_norm")


@dataclass
class RMSPropConfig(OptimizerConfig):
    """RMSProp as TensorFlow has it: epsilon inside the root."""

    name: str = kind("rmsprop")
    decay: float = rate()
    momentum: float = rate()
    epsilon: float = positive()


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with Nesterov momentum."""

    name: str = kind("sgd")
    momentum: float = rate()


@dataclass
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay."""

    name: str = kind("adamw")
    beta1: float = rate()
    beta2: float = rate()
    epsilon: float = positive()


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Adafactor, which stores a row and a column of second moments per kernel.

    Attributes:
        decay: the exponent of the second moments' decay.
        epsilon: the smallest root mean square by which a parameter's step is scaled.
        clip_threshold: the largest root mean square of an update.
    """

    name: str = kind("adafactor")
    decay: float = share("an exponent")
    epsilon: float = positive()
    clip_threshold: float = positive()


@dataclass
class ScheduleConfig(Section):
    """The learning rate over time: a linear warm-up, then a curve.

    Attributes:
        name: the curve.
        warm_up_epochs: the length of the warm-up.
        warm_up_steps: the length in steps, instead of warm_up_epochs, which is 0 then; null uses the epochs.
        decay_rate: the factor of the exponential curve's stairs.
        decay_epochs: the length of a stair.
    """

    place: ClassVar[str] = "schedule."
    name: Decay = MISSING
    warm_up_epochs: float = at_least(0)
    warm_up_steps: int | None = at_least(0)
    decay_rate: float = share("a factor")
    decay_epochs: float = positive()

    def __post_init__(self) -> None:
        super().__post_init__()
        one = self.warm_up_steps is None or self.warm_up_epochs == 0
        require(one, "schedule.warm_up_epochs", self.warm_up_epochs, "0 where schedule.warm_up_steps is set")
        rises = self.name is not Decay.inverse_square_root or self.warm_up_epochs > 0 or (self.warm_up_steps or 0) > 0
        expected = "1 or more, or schedule.warm_up_epochs above 0, with schedule.name=inverse_square_root"
        require(rises, "schedule.warm_up_steps", self.warm_up_steps, expected)


@dataclass
class EmaConfig(Section):
    """The moving average of weights and statistics, which is evaluated in their place.

    Attributes:
        decay: the average's decay; null evaluates the weights themselves.
        warm_up: average over fewer steps at first, for short runs.
    """

    place: ClassVar[str] = "ema."
    decay: float | None = rate()
    warm_up: bool = MISSING


@dataclass
class TrackingConfig(Section):
    """Where Weights & Biases keeps the run."""

    place: ClassVar[str] = "tracking."
    mode: TrackingMode = MISSING
    project: str = MISSING


@dataclass
class EvaluationConfig(Section):
    """When and how the model is evaluated.

    Attributes:
        batch_size: examples per mini-batch; for translation, tokens: the number of sentences times the length of the
            longest source or target among them.
        every_epochs: evaluate every n epochs. null for this and `every_steps` never evaluates; otherwise the end of
            training is evaluated too.
        every_steps: evaluate every n steps; null leaves it to `every_epochs`.
        max_batches: evaluate on at most n mini-batches of each set, spread evenly; null evaluates on all.
        statistics_batches: before an evaluation, compute the statistics of batch norms anew from n training
            mini-batches; null evaluates with their moving averages.
        patience: stop training after n evaluations in a row without a smaller loss; null never stops early.
        raw: if weights are averaged, evaluate the weights themselves too, as "raw_<figure>"; false halves the time.
            null, in runs older than this setting, is true.
        autocast: the precision of the forward pass.
    """

    place: ClassVar[str] = "trainer.evaluation."
    batch_size: int = at_least(1)
    every_epochs: int | None = at_least(1)
    every_steps: int | None = at_least(1)
    max_batches: int | None = at_least(1)
    statistics_batches: int | None = at_least(1)
    patience: int | None = at_least(1)
    raw: bool | None = MISSING
    autocast: Autocast = MISSING


@dataclass
class CheckpointsConfig(Section):
    """When checkpoints are saved, and how many are kept.

    Attributes:
        every_steps: save every n steps too, besides at the end of training and whenever the evaluation loss improves.
        keep: the number of newest checkpoints to keep, besides the one with the lowest evaluation loss; null saves
            none, but still resumes from an existing one.
    """

    place: ClassVar[str] = "trainer.checkpoints."
    every_steps: int | None = at_least(1)
    keep: int | None = at_least(1)

    def __post_init__(self) -> None:
        """Check each value, and that nothing is saved where nothing is kept."""
        super().__post_init__()
        can_save = self.keep is not None or self.every_steps is None
        expected = "null where trainer.checkpoints.keep is null"
        require(can_save, "trainer.checkpoints.every_steps", self.every_steps, expected)


@dataclass
class NonFiniteConfig(Section):
    """What happens after a loss or gradient norm that is not finite.

    Attributes:
        action: stop the run, or skip the mini-batch.
        max_skipped_steps: the number of mini-batches that may be skipped before the run stops.
    """

    place: ClassVar[str] = "trainer.non_finite."
    action: NonFiniteAction = MISSING
    max_skipped_steps: int = at_least(0)


@dataclass
class TrainerConfig(Section):
    """The length of training, its precision, and what it saves.

    Attributes:
        num_epochs: the number of passes over the training data.
        max_steps: end training early, after this many steps; null is no limit.
        batch_size: examples of a whole mini-batch, N, over all replicas; for translation, tokens.
        label_smoothing: the share of the target's probability that is spread over all classes.
        num_untimed_steps: the number of first steps of a session that the reported speed leaves out.
        timeline_every_steps: record a timeline every n steps after the untimed ones, and at the last; null is never.
        overfit_batches: train on the first n mini-batches again and again, to see whether the model can learn them;
            null trains on all.
        profile_step: the step, from 0, that torch's profiler records on every process; null records none.
        autocast: the precision of the forward and backward pass in training; float16 scales the loss, so that gradients
            do not vanish, and skips the update of a step whose gradients overflow.
        channels_last: store images and kernels with their channels last; null is true on GPUs.
        compile: compile each layer with torch.compile.
        cuda_graphs: on GPUs, run each layer as one CUDA graph in training; null is false.
        deterministic: use only kernels that give the same bits each time, and are slower; null is false.
        float32_matmul_precision: the precision of products and convolutions of float32; null is highest.
        max_hours: save and stop after this many hours, counted from the start of the process; null is no limit.
        evaluation: when and how the model is evaluated.
        checkpoints: when checkpoints are saved.
        non_finite: what happens after a loss that is not finite.
        resume: auto continues the newest unfinished run of the same settings.
        resume_from: the checkpoint from which a new run starts; null starts from scratch.
        dry_run: print the plan and stop.
    """

    place: ClassVar[str] = "trainer."
    num_epochs: int = at_least(1)
    max_steps: int | None = at_least(1)
    batch_size: int = at_least(1)
    label_smoothing: float = rate()
    num_untimed_steps: int = at_least(0)
    timeline_every_steps: int | None = at_least(1)
    overfit_batches: int | None = at_least(1)
    profile_step: int | None = at_least(0)
    autocast: Autocast = MISSING
    channels_last: bool | None = MISSING
    compile: bool = MISSING
    cuda_graphs: bool | None = MISSING
    deterministic: bool | None = MISSING
    float32_matmul_precision: MatmulPrecision | None = MISSING
    max_hours: float | None = positive()
    evaluation: EvaluationConfig = MISSING
    checkpoints: CheckpointsConfig = MISSING
    non_finite: NonFiniteConfig = MISSING
    resume: Resume = MISSING
    resume_from: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_one = not (self.cuda_graphs and self.compile)
        require(is_one, "trainer.cuda_graphs", "true", "false with trainer.compile=true")
