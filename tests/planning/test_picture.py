"""Timelines become a picture of a size to look at."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import matplotlib as mpl
import pytest

from gpipe.pipeline.schedule import Kind
from gpipe.pipeline.schedule import gpipe as gpipe_schedule
from gpipe.planning.picture import plot
from gpipe.planning.simulation import simulate


@pytest.mark.parametrize("num_timelines", [1, 2])
def test_the_picture_is_a_png_that_fits_a_page(num_timelines: int, tmp_path: Path) -> None:
    timeline = simulate(gpipe_schedule(4, 8), lambda task: 1.0 + (task.kind is Kind.BACKWARD))
    plot({f"timeline {i}": timeline for i in range(num_timelines)}, tmp_path / "steps.png")
    data = (tmp_path / "steps.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 <= width <= 2000
    assert 200 * num_timelines <= height <= 600 * num_timelines
    assert 10_000 < len(data) < 500_000


def test_every_box_that_is_wide_enough_has_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")  # texts stay texts
    wide, narrow = (simulate(gpipe_schedule(2, count), lambda task: 1.0) for count in (3, 400))
    plot({"wide": wide}, str(tmp_path / "wide.svg"))
    plot({"wide": wide, "narrow": narrow}, tmp_path / "both.svg")
    numbers = [re.findall(r">(\d+)</text>", (tmp_path / name).read_text()) for name in ("wide.svg", "both.svg")]
    ticks = [str(round(tick)) for tick in range(0, 30000, 5000)]
    assert [sum(number in "012" for number in found if number not in ticks[1:]) >= 18 for found in numbers] == [
        True,
        False,
    ]
