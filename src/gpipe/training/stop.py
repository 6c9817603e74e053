"""The end of a training that was asked to stop."""


class Stopped(Exception):
    """The training stopped between two steps, on all processes; its message says why, where, and how to go on.

    Attributes:
        step: the number of finished steps.
        is_saved: whether there is a checkpoint of that step.
    """

    def __init__(self, reason: str, step: int, *, is_saved: bool) -> None:
        self.step = step
        self.is_saved = is_saved
        where = f"after step {step}" if step else "before the first step"
        unsaved = step and not is_saved
        end = "nothing is saved (trainer.checkpoints.keep=null)" if unsaved else "the same command again goes on"
        super().__init__(f"stopped by {reason} {where}: {end}.")
