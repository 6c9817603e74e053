"""The outcome of a training, and the running totals behind it."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_MOST_TIMED = 10_000  # of a long training, only this many of the last steps
# Totals that are in the summary as they are.
_SUMMARIZED = (
    "seconds", "best_top1", "bubble", "wait_seconds", "num_replaced", "evaluation", "least_loss", "num_skipped_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """The outcome of a training; accuracies are fractions of the evaluation set, None without an evaluation.

    Attributes:
        seconds: the time of training and evaluation, including earlier sessions.
        top1, top5, best_top1: figures of the first evaluation set.
        examples: what the data's examples are called.
        examples_per_second: the median over this session's last `num_timed_steps` steps, including the update and the
            wait for data.
        tokens_per_second: likewise; None if an example has one target.
        step_seconds: likewise, without the wait for data.
        peak_memory_bytes: the peak of the pipeline's process that uses most.
        num_replaced: broken training examples that were replaced, counted in each epoch.
        evaluation: the last figures of every evaluation set.
        least_loss: the first set's figures at its lowest loss, and the "step" after which it was measured.
        num_skipped_steps: mini-batches skipped because a number was not finite; overflows of float16 are not counted.
    """

    num_steps: int
    num_epochs: int
    seconds: float
    top1: float | None
    top5: float | None
    best_top1: float | None
    examples: str
    examples_per_second: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    num_timed_steps: int
    peak_memory_bytes: int | None
    bubble: float | None
    wait_seconds: float
    num_replaced: int
    evaluation: dict[str, dict[str, float]]
    least_loss: dict[str, float]
    num_skipped_steps: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a record."""
        return asdict(self)


@dataclass(frozen=True)
class StepSpeed:
    """How long a step took, with `wait_seconds` for data, and how much it processed, over all replicas."""

    seconds: float
    wait_seconds: float
    num_examples: int
    num_targets: int


@dataclass
class Totals:
    """The figures of a training so far; checkpoints save those that `resumable` returns.

    Attributes:
        num_worse: the number of evaluations since the first set's lowest loss.
        scaler: the state of the loss scaler when the checkpoint was saved; None without a scaler.
        evaluated_step: the step of the last evaluation; None before the first.
    """

    seconds: float = 0.0
    wait_seconds: float = 0.0
    num_replaced: int = 0
    best_top1: float | None = None
    evaluation: dict[str, dict[str, float]] = field(default_factory=dict)
    least_loss: dict[str, float] = field(default_factory=dict)
    num_worse: int = 0
    bubble: float | None = None
    peak_memory_bytes: int | None = None
    num_skipped_steps: int = 0
    scaler: dict[str, Any] | None = None
    evaluated_step: int | None = None
    speeds: deque[StepSpeed] = field(default_factory=lambda: deque(maxlen=_MOST_TIMED))

    def resumable(self) -> dict[str, Any]:
        """Return the figures that a resumed run continues, as JSON."""
        left_out = {"bubble", "peak_memory_bytes", "speeds"} | ({"scaler"} if self.scaler is None else set())
        return {name: value for name, value in vars(self).items() if name not in left_out}

    @classmethod
    def resume(cls, results: Mapping[str, Any], sets: Sequence[str] = ()) -> "Totals":
        """Restore what `resumable` returned, from a manifest; `sets` are the evaluation sets in their order.

        Raises:
            ValueError: the results are anything else.
        """
        results = {name: value for name, value in results.items() if name != "least_saved_loss"}  # of older versions
        if {*results} - {"scaler"} != {*cls().resumable()}:
            raise ValueError(
                f"the results of the checkpoint are {', '.join(map(str, results))}, expected "
                f"{', '.join(cls().resumable())}: choose a checkpoint that this program saved."
            )
        evaluation = results["evaluation"]  # in alphabetical order, because a manifest is sorted
        ordered = {name: evaluation[name] for name in (*sets, *evaluation) if name in evaluation}
        return cls(**{**results, "evaluation": ordered})

    def add_evaluation(self, evaluation: dict[str, dict[str, float]], step: int) -> None:
        """Keep the newest figures of each evaluation set, and the best of the first set."""
        self.evaluation, self.evaluated_step = evaluation, step
        loss = self.first("loss")
        self.num_worse += 1
        if loss is not None and loss < self.least_loss.get("loss", math.inf):
            self.least_loss = {**next(iter(evaluation.values())), "step": step}
            self.num_worse = 0
        top1 = self.first("top1")
        if top1 is not None and (self.best_top1 is None or top1 > self.best_top1):
            self.best_top1 = top1

    def forget_evaluations(self) -> None:
        """Drop the figures of evaluations, but not `evaluated_step`: batch norms keep the statistics of that one."""
        self.evaluation, self.best_top1 = {}, None
        self.least_loss, self.num_worse = {}, 0

    def first(self, metric: str) -> float | None:
        """Return a metric of the first evaluation set; None if there is none."""
        return next(iter(self.evaluation.values()), {}).get(metric)

    def summarize(
        self, num_steps: int, num_epochs: int, peak_memory_bytes: int | None, examples: str, num_untimed_steps: int
    ) -> Summary:
        """Summarise a training that ends here; the speed excludes the first steps, unless there are no others."""
        timed = list(self.speeds)[num_untimed_steps:] or list(self.speeds)
        has_tokens = any(speed.num_targets > speed.num_examples for speed in timed)
        return Summary(
            num_steps=num_steps,
            num_epochs=num_epochs,
            top1=self.first("top1"),
            top5=self.first("top5"),
            examples=examples,
            examples_per_second=_median(speed.num_examples / speed.seconds for speed in timed),
            tokens_per_second=_median(speed.num_targets / speed.seconds for speed in timed) if has_tokens else None,
            step_seconds=_median(speed.seconds - speed.wait_seconds for speed in timed),
            num_timed_steps=len(timed),
            peak_memory_bytes=peak_memory_bytes,
            **{name: getattr(self, name) for name in _SUMMARIZED},
        )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
