"""The report on a training that a number which is not finite has ended."""

from gpipe.pipeline.engine import FirstNonFinite
from gpipe.pipeline.job.errors import NonFiniteError


def explain(error: NonFiniteError, place: FirstNonFinite | None, *, skipped: int, is_saved: bool) -> NonFiniteError:
    """Return an error that says what is not finite, where that begins, and what is saved.

    place: where the forward of the same mini-batch, run again, first had such a number; None: nowhere. skipped: how
    many mini-batches were left out before.
    """
    where = "all outputs of its layers and the loss are finite" if place is None else f"the first is {place}"
    before = f"; {skipped} steps were left out before" if skipped else ""
    saved = "; the state before that step is saved" if is_saved else ""
    return NonFiniteError(f"{error.what}: {where}{before}{saved}", stage=None if place is None else place.stage)
