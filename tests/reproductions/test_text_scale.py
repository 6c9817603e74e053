"""The table of what a corpus takes until the first mini-batch."""

from gpipe.records import Record
from reproductions.figure3_multilingual.text_scale import BUILD, RESUME, START, TEXT_SCALE, text_scale

TIMES = {"seconds": 0.5, "seconds_of_work": 0.4, "seconds_from_disk": 0.7}


def measured(private_bytes: list[int]) -> Record:
    rows = [
        {
            "num_pairs": 1_000_000 * 4**place,
            "cache_bytes": 77_000_000 * 4**place,
            BUILD: {"seconds": 30.0, "private_bytes": 140_000_000},
            START: TIMES | {"private_bytes": number, "resident_bytes": 90_000_000},
            RESUME: TIMES | {"private_bytes": 50_000_000, "resident_bytes": 80_000_000},
        }
        for place, number in enumerate(private_bytes)
    ]
    return TEXT_SCALE.make_record({}, {"rows": rows})


def test_what_was_not_measured_is_not_claimed() -> None:
    assert text_scale([]) == TEXT_SCALE.run([]) == "Not run: python -m experiments.text_scale.\n"


def test_a_figure_is_flat_where_it_changes_by_a_fifth_at_most() -> None:
    lines = text_scale([measured([50_000_000, 60_000_000])]).splitlines()
    assert lines[2:4] == [
        "| 1,000,000 | 77 | 30 | 140 | 0.50 | 0.40 | 50 | 0.70 | 0.50 | 0.40 | 50 | 0.70 | 80 |",
        "| 4,000,000 | 308 | 30 | 140 | 0.50 | 0.40 | 60 | 0.70 | 0.50 | 0.40 | 50 | 0.70 | 80 |",
    ]
    title, *figures = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert title == "largest / smallest figure (flat: at most 1.2)"
    assert figures == [*[""] * 3, *["1.00, flat"] * 2, "1.20, flat", *["1.00, flat"] * 6]
    assert "1.22, not flat" in text_scale([measured([50_000_000, 61_000_000])])
