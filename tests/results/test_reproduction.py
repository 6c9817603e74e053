"""Every number that a README shows comes from a record that is committed beside it."""

from pathlib import Path

import pytest

from gpipe.results.records import Record, append_record, make_record
from gpipe.results.reproduction import main, readmes, rendered

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("readme", [path.relative_to(ROOT) for path in readmes(ROOT)], ids=str)
def test_a_readme_shows_what_its_records_say(readme: Path) -> None:
    records = readmes(ROOT)[ROOT / readme]
    assert rendered(ROOT / readme, records) == (ROOT / readme).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", sorted((ROOT / "reproductions").iterdir()), ids=lambda folder: folder.name)
def test_a_reproduction_has_its_claim_its_records_and_no_program(folder: Path) -> None:
    assert {"README.md", "runs.jsonl"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.rglob("*.py"))
    assert "Verdict:" in (folder / "README.md").read_text(encoding="utf-8")


def record(number: int) -> Record:
    return make_record(kind="measured", command="x", experiment="e", config={}, seed=0, results={"number": number})


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table: numbers -->\nold\n<!-- end -->\nafter\n")
    tables = {"numbers": lambda records: "".join(f"{record.results['number']}\n" for record in records)}
    text = rendered(readme, [record(1), record(2)], tables)
    assert text == "before\n<!-- table: numbers -->\n1\n2\n<!-- end -->\nafter\n"
    readme.write_text(text)
    assert rendered(readme, [record(1), record(2)], tables) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [("<!-- table: other -->\n<!-- end -->", "asks for the table 'other'"), ("nothing", "has no table")],
)
def test_a_readme_without_a_known_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        rendered(tmp_path / "README.md", [], {"numbers": lambda records: ""})


def test_a_run_is_added_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "model": {"variant": "b", "num_layers": 3, "num_filters": 16},
        "data": {"name": "photographs", "image_size": 64},
        "pipeline": {"num_stages": 2, "num_microbatches": 4},
    }
    results = {"top1": 0.8375, "seconds": 90.0, "images_per_second": 300.4, "bubble": 0.2, "peak_memory_bytes": 2**29}
    found = make_record(kind="measured", command="train", experiment="small", config=config, seed=7, results=results)
    run, folder = tmp_path / "run", tmp_path / "reproductions" / "claim"
    run.mkdir()
    folder.mkdir(parents=True)
    append_record(run / "record.json", found)
    for readme in (folder / "README.md", tmp_path / "README.md"):
        readme.write_text("<!-- table: image_runs -->\n<!-- end -->\n")
    monkeypatch.chdir(tmp_path)
    main(["add", str(run), str(folder)])
    row = "| AmoebaNet-B (3,16) | photographs, 64 px | 2 | 4 | 7 | 83.8% | 1.5 | 300 | 20.0% | 512 |"
    assert row in (folder / "README.md").read_text()
    assert row in (tmp_path / "README.md").read_text()
