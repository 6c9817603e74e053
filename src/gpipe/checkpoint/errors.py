"""What can be wrong with a checkpoint."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written, read, or used for this model; the message says what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not, or no more, what was saved: an earlier one may be good."""
