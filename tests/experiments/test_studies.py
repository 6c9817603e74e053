"""Every study has the same options, prints its tables, and records nothing unless it is told to."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import program
from experiments.program import StudyProgram, track
from gpipe.records import Record, make_record, read_records
from tests.support.program_server import run_program

FOLDER = Path(__file__).parents[2] / "experiments"
SHARED = ("processes", "program", "tuning", "turns")
STUDIES = [
    *(path.stem for path in sorted(FOLDER.glob("[a-z]*.py")) if path.stem not in SHARED),
    *(path.parent.name for path in sorted(FOLDER.glob("*/__main__.py")) if path.parent.name != "gpu"),
]
DATA = [f"data.{path.stem}" for path in sorted((FOLDER / "data").glob("make_*.py"))]
Publish = Callable[..., str]


@pytest.mark.slow
@pytest.mark.parametrize("study", [*STUDIES, *DATA])
def test_a_study_prints_its_help(study: str) -> None:
    done = run_program(f"experiments.{study}", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr
    assert ("--record [FOLDER]" in done.stdout) == (study in STUDIES)


def test_a_study_prints_its_tables_and_records_nothing() -> None:
    done = run_program("experiments.translation_parameters")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| --- |") == 2 and "| T(24, 8192, 16) |" in done.stdout
    assert "the paper's models" in done.stderr
    assert done.stderr.endswith(
        "Nothing was recorded. With --record, the records go to reproductions/figure3_multilingual/runs.jsonl, and all "
        "pages are rendered.\n"
    )


def make_number(number: int) -> Record:
    return make_record(kind="planned", command="c", experiment="e", config={}, seed=0, results={"number": number})


def count(records: list[Record], paper: list[dict[str, str]]) -> str:
    return f"{[record.results['number'] for record in records]} beside {len(paper) > 0}\n"


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Publish the numbers 1 and 2 with some options; return what reaches the claims."""

    def run(*options: str) -> str:
        added: list[str] = []
        monkeypatch.setattr(sys, "argv", ["study", *options])
        monkeypatch.setattr(program, "write_pages", lambda: added.append("rendered"))
        monkeypatch.setattr(
            program, "add_records", lambda name, made: added.extend(f"{name} {one.results}" for one in made)
        )
        study = StudyProgram("A study.", {"table2_throughput": [count]}, rounds=3)
        assert isinstance(study.parse(), argparse.Namespace)
        study.publish({"table2_throughput": [make_number(1), make_number(2)]})
        return "; ".join(added)

    return run


def test_only_the_option_adds_records_to_a_claim(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish() == ""
    assert publish("--record") == "table2_throughput {'number': 1}; table2_throughput {'number': 2}; rendered"
    assert capsys.readouterr().out == "[1, 2] beside True\n\n" * 2


def test_a_folder_takes_the_records_of_a_trial(
    publish: Publish, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish("--record", str(tmp_path / "trial")) == ""
    assert [record.results for record in read_records(tmp_path / "trial" / "runs.jsonl")] == [
        {"number": 1},
        {"number": 2},
    ]
    assert capsys.readouterr().err == f"Added to {tmp_path / 'trial' / 'runs.jsonl'}.\n"


def parse_a_trial() -> None:
    study = StudyProgram("A study.", {}, rounds=3)
    study.parse()
    study.require_folder("it is tiny")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds is 0, but it must be at least 1."),
        (["--record"], "--record needs a folder here, such as --record runs/trial: it is tiny."),
    ],
)
def test_what_does_not_belong_on_a_page_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", *options])
    with pytest.raises(SystemExit):
        parse_a_trial()
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def test_progress_is_a_line_every_ten_seconds_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 104.0, 112.0, 115.0, 116.0])
    monkeypatch.setattr(program.time, "monotonic", lambda: next(clock))
    assert list(track("abcd", "letters")) == list("abcd")
    assert capsys.readouterr().err == "2/4  12 s left  letters\n4/4  0 s left  letters\n"
