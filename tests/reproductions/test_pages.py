"""Every number that a README shows comes from a record that is committed beside it."""

import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe
from gpipe.pipeline.step_end.gradient_norm import global_norm
from gpipe.programs.jobs import Outcome, read_jobs, write_outcome
from gpipe.records import RECORD_FILE, Record, append_record, make_record, read_records, write_record
from gpipe.training.endings import explain_non_finite_evaluation
from reproductions.__main__ import main
from reproductions.additions import add_jobs, add_records
from reproductions.bubble.saves import DCP_SYNCHRONOUS
from reproductions.pages import CLAIMS, fill_tables, find_pages, render_pages, write_pages

ROOT = Path(__file__).parents[2]
TABLE4 = "table4_imagenet_and_transfer"
PAGES = [path.relative_to(ROOT) for path in find_pages(ROOT)]


@cache
def expected_pages() -> dict[Path, str]:
    return render_pages(ROOT)


@pytest.mark.parametrize("readme", PAGES, ids=str)
def test_a_readme_shows_what_its_records_say(readme: Path) -> None:
    assert expected_pages()[ROOT / readme] == (ROOT / readme).read_text(encoding="utf-8")


@pytest.mark.parametrize("readme", PAGES, ids=str)
def test_no_verdict_is_typed(readme: Path) -> None:
    typed = re.sub(r"<!-- table: .*?<!-- end -->", "", (ROOT / readme).read_text(encoding="utf-8"), flags=re.DOTALL)
    stated_test = re.search(r"## The test behind a verdict.*?\n## ", typed, flags=re.DOTALL)
    text = typed.replace(stated_test[0], "") if stated_test else typed
    words = "reproduced|contradicted|no difference found|undecided|same trend|Verdict:"
    assert not re.search(rf"\b({words})", text), "the program that makes the tables writes the verdicts"


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_has_its_page_its_records_and_its_tables_in_its_folder(name: str) -> None:
    folder = ROOT / "reproductions" / name
    assert {"README.md", "runs.jsonl", "tables.py"} <= {path.name for path in folder.iterdir()}
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "\nClaim" in page and "<!-- table: claims -->" in page and "<!-- table: deviations -->" in page


def record(number: int) -> Record:
    return make_record(kind="measured", command="x", experiment="e", config={}, seed=0, results={"number": number})


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table: numbers -->\nold\n<!-- end -->\nafter\n")
    tables = {"numbers": "1\n2\n"}
    text = fill_tables(readme, tables.__getitem__)
    assert text == "before\n<!-- table: numbers -->\n1\n2\n<!-- end -->\nafter\n"
    readme.write_text(text)
    assert fill_tables(readme, tables.__getitem__) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [("<!-- table: other -->\n<!-- end -->", "asks for the table 'other'"), ("nothing", "has no table")],
)
def test_a_page_of_a_claim_without_a_known_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = tmp_path / "reproductions" / "claim"
    folder.mkdir(parents=True)
    (folder / "runs.jsonl").touch()
    (folder / "README.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        render_pages(tmp_path)


def test_pages_of_the_documentation_show_tables_of_all_claims_and_link_to_their_pages(tmp_path: Path) -> None:
    folder, page = tmp_path / "reproductions" / "bubble", tmp_path / "docs" / "guides" / "saving.md"
    for path in (folder, page.parent):
        path.mkdir(parents=True)
    (folder / "README.md").write_text("<!-- table: claims -->\n<!-- end -->\n")
    results = {"rows": [{"saver": "ours", "still_seconds": 0.005, "total_seconds": 1.5, "bytes_per_second": 4e8}]}
    results["rows"].append(results["rows"][0] | {"saver": DCP_SYNCHRONOUS, "still_seconds": 0.5})
    config = {"num_bytes": 5e8, "num_processes": 2}
    saved = make_record(kind="measured", experiment="checkpoint_cost", config=config, seed=0, results=results)
    append_record(folder / "runs.jsonl", saved)
    page.write_text("<!-- table: checkpoint_cost -->\n<!-- end -->\n<!-- table: claims -->\n<!-- end -->\n")
    page.with_name("without.md").write_text("No table.\n")
    text = render_pages(tmp_path)[page]
    assert "| ours | 5 | 1.0% |" in text and "](../../reproductions/bubble)" in text


def test_a_run_is_added_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    for word in ("now", "already"):
        main(["add", str(run), str(folder)], tmp_path)
        assert capsys.readouterr().out == f"{run} is {word} on record in {folder}\n"
    assert read_records(folder / "runs.jsonl") == [found]
    row = "| AmoebaNet-B (3,16) | photographs, 64 px | 2 | 4 | 7 | 83.8% | 1.5 | 300 | 20.0% | 512 |"
    assert row in (folder / "README.md").read_text()
    assert row in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("run", "claim", "said"),
    [
        ("nowhere", "reproductions/claim", "error: nowhere/record.json cannot be made or opened (No such file or"),
        ("run", "reproductions/clam", "error: reproductions/clam is not the folder of a claim, expected one in "),
        ("run", "run", "error: run is not the folder of a claim, expected one in "),
    ],
)
def test_a_wrong_folder_is_told_in_a_sentence_and_none_is_made(
    run: str, claim: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reproductions" / "claim").mkdir(parents=True)
    write_record(tmp_path / "run" / RECORD_FILE, record(1))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit):
        main(["add", run, claim], tmp_path)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(said) and sorted(tmp_path.rglob("*")) == before


def test_a_sweep_adds_its_records_and_what_is_missing_and_replaces_what_it_says_anew(tmp_path: Path) -> None:
    folder, sweep = tmp_path / "reproductions" / TABLE4, tmp_path / "sweep"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("<!-- table: table4 -->\n<!-- end -->\n")
    (folder / "paper.csv").write_text(
        "data,title,train,test,classes,top1,top5\n"
        "imagenet,ImageNet,1281167,50000,1000,84.4,97.0\ncifar10,CIFAR-10,50000,10000,10,99.0,\n"
    )
    (tmp_path / "README.md").write_text("<!-- table: image_runs -->\n<!-- end -->\n")
    append_record(folder / "runs.jsonl", record(7))
    for attempt in (1, 2):
        for seed in (0, 1):
            job = sweep / f"seed={seed}"
            job.mkdir(parents=True, exist_ok=True)
            write_outcome(job, Outcome("done", [f"seed={seed}"], "digits"))
            config = {"seed": seed, "data": {"name": "digits"}, "launch": {"num_processes": attempt}}
            results = {"top1": attempt / 10}
            made = make_record(
                kind="measured", command="x", experiment="transfer", config=config, seed=seed, results=results
            )
            write_record(job / RECORD_FILE, made)
            (job / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "test/top1": 0.5}\n')
            missing = sweep / f"cifar10,seed={seed}"
            missing.mkdir(exist_ok=True)
            write_outcome(missing, Outcome("not run", [f"seed={seed}"], "cifar10", "data missing"))
        add_jobs(TABLE4, "transfer", "python train.py -m", read_jobs(sweep), tmp_path)
        write_pages(tmp_path)
        records = read_records(folder / "runs.jsonl")
        assert [(found.kind, found.seed) for found in records] == [
            ("measured", 0), ("measured", 0), ("measured", 1), ("not run", 0),
        ]  # fmt: skip
        assert [found.results.get("top1") for found in records[1:3]] == [attempt / 10] * 2
        assert records[1].results["curve"] == [{"step": 1, "epoch": 1, "test/top1": 0.5}]
    assert "not run: data missing" in (folder / "README.md").read_text()


def test_a_sweep_outside_of_the_repository_is_told_where_to_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="start the sweep in the repository, or set reproduction=null"):
        add_jobs("claim", "transfer", "x", [], tmp_path)


def test_a_study_that_goes_on_adds_only_the_records_that_are_new(tmp_path: Path) -> None:
    path = tmp_path / "reproductions" / "claim" / "runs.jsonl"
    first, second = (
        make_record(kind="measured", command="x", experiment="e", config={"learning_rate": 0.1}, seed=seed, results={})
        for seed in (0, 1)
    )
    add_records("claim", [first], tmp_path)
    add_records("claim", [first, second], tmp_path)
    assert [record.seed for record in read_records(path)] == [0, 1]


def test_a_training_that_diverged_is_a_result_and_one_that_failed_otherwise_is_not(tmp_path: Path) -> None:
    folder, sweep = tmp_path / "reproductions" / "claim", tmp_path / "sweep"
    folder.mkdir(parents=True)
    for readme in (folder / "README.md", tmp_path / "README.md"):
        readme.write_text("<!-- table: image_runs -->\n<!-- end -->\n")
    (folder / "runs.jsonl").touch()
    with pytest.raises(ValueError, match="the gradient of") as norm:
        global_norm([("layers.0.weight", math.nan)])
    pipeline = gpipe.Pipeline(nn.Sequential(nn.Linear(1, 1)), lambda outputs, targets: math.inf * outputs.sum(), [1])
    with pytest.raises(gpipe.NonFiniteError) as loss:
        pipeline.train_step((torch.ones(1, 1), torch.ones(1, 1)))
    evaluation = explain_non_finite_evaluation("raw_loss on test", -math.inf, 3, is_saved=True)
    for seed, reason in enumerate((str(loss.value), f"step 1: {norm.value}", str(evaluation), "no space is left")):
        job = sweep / f"seed={seed}"
        job.mkdir(parents=True)
        config = {"seed": seed, "data": {"name": "text"}}
        write_outcome(job, Outcome("failed", [job.name], "text", reason, config))
        (job / "metrics.jsonl").write_text('{"step": 1, "learning_rate": 0.5, "loss": 3.0, "gradient_norm": 2.0}\n')
    for _ in range(2):  # the second time, records take the place of the first's
        add_jobs("claim", "deep", "python train.py -m", read_jobs(sweep), tmp_path)
    records = read_records(folder / "runs.jsonl")
    assert [(found.kind, found.experiment, found.seed) for found in records] == [
        ("measured", "deep", 0),
        ("measured", "deep", 1),
        ("measured", "deep", 2),
    ]
    course = [{"step": 1, "loss": 3.0, "gradient_norm": 2.0}]
    assert records[0].results == {"failure": str(loss.value), "curve": [], "training": course}


def test_speeds_are_replaced_on_the_same_machine_alone_and_jobs_without_devices_are_recorded_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sweep = tmp_path / "reproductions" / "claim", tmp_path / "sweep"
    folder.mkdir(parents=True)
    for readme in (folder / "README.md", tmp_path / "README.md"):
        readme.write_text("<!-- table: image_runs -->\n<!-- end -->\n")
    (folder / "runs.jsonl").touch()
    for attempt, cpu in enumerate(("slow", "slow", "fast")):
        monkeypatch.setattr("gpipe.records._read_processor", {"model name": cpu, "flags": ""}.__getitem__)
        for num_stages in (2, 8, 16):
            job = sweep / f"stages={num_stages}"
            job.mkdir(parents=True, exist_ok=True)
            config = {"seed": 3, "data": {"name": "noise"}, "pipeline": {"num_stages": num_stages}, "launch": {}}
            if num_stages > 2:
                reason = f"needs {num_stages} cores, 2 are here"
                write_outcome(job, Outcome("not run", [job.name], "noise", reason, config))
                continue
            write_outcome(job, Outcome("done", [job.name], "noise"))
            results = {"top1": None, "examples_per_second": float(attempt)}
            made = make_record(kind="measured", command="", experiment="e", config=config, seed=3, results=results)
            write_record(job / RECORD_FILE, made)
        add_jobs("claim", "e", "python train.py -m", read_jobs(sweep), tmp_path)
    records = read_records(folder / "runs.jsonl")
    speeds = [(found.hardware["cpu"], found.examples_per_second) for found in records if found.kind == "measured"]
    assert speeds == [("slow", 1.0), ("fast", 2.0)]
    unmade = [found for found in records if found.kind == "not run"]
    assert [found.config["pipeline"]["num_stages"] for found in unmade] == [8, 16]
    assert unmade[0].results == {"reason": "needs 8 cores, 2 are here"} and unmade[0].seed == 3
