"""What a manifest says of a run's position and of a tensor."""

from dataclasses import dataclass

from gpipe.checkpoint.header import Form


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` finished steps, `batch` of which lie in the unfinished `epoch` (both from 0)."""

    step: int
    epoch: int
    batch: int
    seed: int


@dataclass(frozen=True)
class TensorEntry(Form):
    """One tensor: its dtype and shape, and the file that has it."""

    file: str

    @property
    def form(self) -> Form:
        """The dtype and the shape alone."""
        return Form(self.dtype, self.shape)
