"""What was measured corrects what is planned, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpipe.planning.accelerator import LayerSeconds
from gpipe.planning.calibration import Calibration

PLANNED = [LayerSeconds(1.0, 1.0, 2.0, 1.0, 0.1), LayerSeconds(4.0, 4.0, 0.0)]
MEASURED = [LayerSeconds(2.0, 3.0, 5.0, 2.0, 0.5), LayerSeconds(4.0, 2.0, 1.0)]
FOUND = Calibration({"device": "cpu"}, 8, MEASURED, PLANNED, 1e-3)


def test_the_plan_of_what_was_measured_is_what_was_measured() -> None:
    assert FOUND.correct(PLANNED) == MEASURED


def test_other_micro_batches_are_corrected_by_the_same_shares() -> None:
    twice = [LayerSeconds(*(2 * value for value in layer)) for layer in PLANNED]
    first, second = FOUND.correct(twice)
    assert first == LayerSeconds(4.0, 6.0, 10.0, 4.0, 1.0)
    assert second == LayerSeconds(8.0, 4.0, 1.0)  # nothing was planned for its backward


def test_gradients_of_weights_that_waited_for_larger_micro_batches_alone_are_their_share_of_the_backward() -> None:
    small = Calibration({}, 1, [LayerSeconds(2.0, 2.0, 6.0, 0.001, 0.0)], [LayerSeconds(1.0, 1.0, 2.0)], 0.0)
    assert small.correct([LayerSeconds(8.0, 8.0, 16.0, 7.0, 1.0)]) == [LayerSeconds(16.0, 16.0, 48.0, 21.0, 0.0)]


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        FOUND.correct(PLANNED[:1])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    FOUND.write(path)
    assert Calibration.read(path) == FOUND
    replace(FOUND, microbatch_size=4).write(path)
    assert Calibration.read(path).microbatch_size == 4


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"origin": {}, "microbatch_size": 1, "measured": [["a"]], "planned": []}']
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"file.json is not a calibration \(.*\): remove it, or run plan.py calibrate=true"
    ):
        Calibration.read(path)
