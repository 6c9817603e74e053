"""Learning rates as pure functions of the number of finished steps, with nothing to save or resume.

timm.scheduler has the same curves as objects that hold an optimiser; the tests use them as an oracle.
"""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(base: float, *, warm_up_steps: int = 0) -> Schedule:
    """Stay at `base` after a linear warm-up."""
    return lambda step: base * _warm_up(step, warm_up_steps)


def exponential(base: float, *, decay_rate: float, decay_steps: int, warm_up_steps: int = 0) -> Schedule:
    """Multiply `base` by `decay_rate` after every `decay_steps` steps (a staircase), after a linear warm-up.

    The staircase counts from the first step of training, not from the end of the warm-up, as in the public TPU code.
    """
    if decay_steps < 1:
        raise ValueError(
            f"schedule.decay_epochs gives {decay_steps} steps per stair, but a stair needs at least 1: raise it."
        )
    return lambda step: (
        base * (_warm_up(step, warm_up_steps) if step < warm_up_steps else decay_rate ** (step // decay_steps))
    )


def cosine(base: float, *, num_steps: int, warm_up_steps: int = 0, final: float = 0.0) -> Schedule:
    """Fall along half a cosine from `base` after the warm-up to `final` at `num_steps`, and stay there.

    If the warm-up is longer than `num_steps`, the rate only rises.
    """

    def rate(step: int) -> float:
        if step < warm_up_steps:
            return base * _warm_up(step, warm_up_steps)
        progress = min(1.0, (step - warm_up_steps) / max(1, num_steps - warm_up_steps))
        return final + 0.5 * (base - final) * (1.0 + math.cos(math.pi * progress))

    return rate


def inverse_square_root(base: float, *, warm_up_steps: int) -> Schedule:
    """Rise linearly to `base` in the warm-up, then fall as 1 / sqrt(steps) (Vaswani et al. 2017)."""
    if warm_up_steps < 1:
        raise ValueError(
            f"schedule.warm_up_epochs gives {warm_up_steps} warm-up steps, but the inverse square root needs at least "
            "1: raise schedule.warm_up_epochs."
        )
    return lambda step: base * min(_warm_up(step, warm_up_steps), math.sqrt(warm_up_steps / (step + 1)))


def build_schedule(
    name: str,
    base: float,
    *,
    steps_per_epoch: int,
    num_steps: int,
    warm_up_epochs: float = 0.0,
    warm_up_steps: int | None = None,
    decay_rate: float = 0.97,
    decay_epochs: float = 3.0,
) -> Schedule:
    """Build the schedule called `name`: exponential, cosine, inverse_square_root or constant.

    Epochs become steps here; `warm_up_steps` overrides `warm_up_epochs`. The defaults are the paper's: x0.97 every 3
    epochs (paper, press summary of version 1).

    Raises:
        ValueError: the name is another, or a schedule cannot have these settings.
    """
    warm_up_steps = round(warm_up_epochs * steps_per_epoch) if warm_up_steps is None else warm_up_steps
    if name == "exponential":
        decay_steps = round(decay_epochs * steps_per_epoch)
        return exponential(base, decay_rate=decay_rate, decay_steps=decay_steps, warm_up_steps=warm_up_steps)
    if name == "cosine":
        return cosine(base, num_steps=num_steps, warm_up_steps=warm_up_steps)
    if name == "inverse_square_root":
        return inverse_square_root(base, warm_up_steps=warm_up_steps)
    if name == "constant":
        return constant(base, warm_up_steps=warm_up_steps)
    raise ValueError(
        f"the schedule is {name!r}, expected exponential, cosine, inverse_square_root or constant: correct its name."
    )


def _warm_up(step: int, warm_up_steps: int) -> float:
    """Return the factor of a linear warm-up, in (0, 1].

    Deviation: the warm-up starts at 1 / warm_up_steps of the peak learning rate. The public TPU code starts at 0, so
    its first step does nothing.
    """
    return min(1.0, (step + 1) / warm_up_steps) if warm_up_steps > 0 else 1.0
