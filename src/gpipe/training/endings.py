"""How a training ends early: a request to stop, or a number that is not finite."""

from gpipe.pipeline.job.errors import FirstNonFinite, NonFiniteError


class Stopped(Exception):
    """The training stopped between two steps, on all processes; the message says why, where, and how to resume.

    Attributes:
        step: the number of finished steps.
        is_saved: whether that step has a checkpoint.
    """

    def __init__(self, reason: str, step: int, *, saved_step: int | None) -> None:
        self.step = step
        self.is_saved = saved_step == step
        where = f"after step {step}" if step else "before the first step"
        nothing = "nothing" if saved_step is None else f"nothing after step {saved_step}"
        unsaved = step and not self.is_saved
        end = f"{nothing} is saved (trainer.checkpoints.keep=null)" if unsaved else "repeat the command to resume"
        super().__init__(f"stopped by {reason} {where}: {end}.")


def explain_non_finite(
    error: NonFiniteError, place: FirstNonFinite | None, *, skipped: int, is_saved: bool
) -> NonFiniteError:
    """Return an error that says what is not finite, where that begins, and what is saved.

    `place` is where a second forward pass of the same mini-batch first had such a number; None if nowhere.
    """
    where = "all outputs of its layers and the loss are finite" if place is None else f"the first is {place}"
    before = f"; {skipped} steps were skipped before" if skipped else ""
    saved = "; the state before that step is saved" if is_saved else ""
    return NonFiniteError(f"{error.what}: {where}{before}{saved}", stage=None if place is None else place.stage)


def explain_non_finite_evaluation(what: str, value: float, step: int, *, is_saved: bool) -> ValueError:
    """Return the error for a loss of an evaluation; by it, pages of results know a run that diverged."""
    saved = " (the state is saved)" if is_saved else ""
    return ValueError(
        f"the {what} after step {step} is {value}{saved}: lower the learning rate, clip the gradients, or resume from "
        "an earlier checkpoint."
    )
