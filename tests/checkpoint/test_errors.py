"""Which of several processes' errors is raised on all."""

import pytest

from gpipe.checkpoint.errors import CheckpointError, DamagedCheckpoint, raise_first


def test_damage_comes_after_an_error_that_an_earlier_checkpoint_would_not_mend() -> None:
    damage, misfit = ({"text": text, "is_damage": text == "damaged"} for text in ("damaged", "of another model"))
    with pytest.raises(CheckpointError, match="of another model") as raised:
        raise_first([None, damage, misfit])
    assert not isinstance(raised.value, DamagedCheckpoint)
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        raise_first([None, damage])
    raise_first([None, None])
