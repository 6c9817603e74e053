"""The measurement of a corpus by its number of pairs, on a few thousand."""

import importlib
from pathlib import Path

import pytest


def test_fresh_processes_open_the_corpus_and_their_memory_is_watched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("experiments.text_scale")
    script.write_text(tmp_path / "text", 3000)
    lines = [len(path.read_text().splitlines()) for path in sorted((tmp_path / "text").glob("train.*"))]
    assert lines == [1800, 1800, 750, 750, 300, 300, 150, 150]
    built = script.watch(tmp_path / "text", 2000, script.BUILD)
    assert capfd.readouterr().err.count("once\n") == 4, "each language is tokenised once"
    script.forget_pages(tmp_path / "text")
    found = script.watch(tmp_path / "text", 2000, script.RESUME)
    assert capfd.readouterr().err == ""
    assert found["num_batches"] == built["num_tokens"] // 2000
    for row in (built, found):
        assert 0 <= row["private_bytes"] <= row["resident_bytes"] < 1 << 30 and row["seconds"] > 0
    runs = [{"seconds": seconds, "private_bytes": number} for seconds, number in ((3, 1), (1, 9), (2, 2))]
    assert script.summarize(runs) == {"seconds": 1, "private_bytes": 2}
