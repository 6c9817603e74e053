"""The command that a page prints for a training composes the recorded settings."""

import re
import shlex
from pathlib import Path

import pytest

from gpipe.config import compose_plain
from gpipe.records import Record, differences, read_records
from reproductions import RUNS_FILE
from reproductions.commands import Cell, cell_command, commands_table, scoring_command
from tests.reproductions.translation_records import cells, scored, trained

ROOT = Path(__file__).parents[2] / "reproductions"
PAGES = ("figure3_multilingual", "table4_imagenet_and_transfer", "table5_batch_size")


def kinds_of_trainings() -> dict[str, Record]:
    """One record of each command, whatever its seed and language."""
    found: dict[str, Record] = {}
    for page in PAGES:
        for record in read_records(ROOT / page / RUNS_FILE):
            if record.kind == "measured" and "trainer" in record.config and record.command.startswith("python train"):
                found[re.sub(r"seed=\d+|\[\w+\]", "", cell_command(record))] = record
    return found


KINDS = kinds_of_trainings()


@pytest.mark.slow
@pytest.mark.parametrize("record", KINDS.values(), ids=list(KINDS))
def test_a_printed_command_composes_the_recorded_training(record: Record) -> None:
    words = [word for word in shlex.split(cell_command(record))[2:] if not word.startswith("init_from=")]
    composed = compose_plain([*words, "init_from=null"])
    root = composed["data"]["root"]  # a folder of this machine
    recorded = {**record.config, "init_from": None, "data": {**record.config["data"], "root": root}}
    assert differences(recorded, composed) == []


@pytest.mark.parametrize("name", ["bilingual", "deep_or_wide", "deep_training", "batch_size"])
def test_the_experiment_alone_is_the_recorded_training_in_one_process(name: str) -> None:
    # Without what the recorded commands said of pipeline and launch, because the files did not say it then.
    records = [record for record in KINDS.values() if record.experiment == f"{name}_laptop"]
    assert records
    for record in records:
        words = shlex.split(cell_command(record))[2:]
        composed = compose_plain([word for word in words if not word.startswith("pipeline.")])
        assert differences(record.config, composed) == []
        assert composed["launch"]["num_processes"] == composed["pipeline"]["num_stages"] == 1
        assert composed["launch"]["device"] == "cpu"
        # launch=one_process makes it auto, which is the processor where there is no GPU.
        assert record.config["launch"]["device"] == "cpu" or not record.hardware["gpus"]


def test_what_changes_no_result_is_left_out_and_a_folder_is_to_be_filled_in() -> None:
    run = trained("bilingual_laptop", 2, {}, languages=["sw"])
    command = "python train.py 'data.languages=[sw]' seed=2 data.root=<...>/text launch=one_process tracking=disabled"
    command += " reproduction=null"
    run = Record(**{**vars(run), "command": command})
    assert cell_command(run) == "python train.py 'data.languages=[sw]' seed=2 data.root=/path/to/text"


def test_a_training_names_the_run_whose_checkpoint_it_began_with_where_any_has_one() -> None:
    run, tuned = (trained("transfer_few_laptop", seed, {}) for seed in (0, 1))
    tuned.config["init_from"] = "runs/amoebanet_imagenet_laptop/2026-11-25_05-21-41"
    run.config["init_from"] = None
    table = commands_table([Cell("digits", run, {}), Cell("digits", tuned, {})])
    assert table.splitlines()[0] == "| training | seed | command | started from the run in |"
    assert cells(table) == [["digits", "0", "`c`", ""], ["digits", "1", "`c`", "2026-11-25_05-21-41"]]
    assert "started" not in commands_table([Cell("digits", run, {})])


def test_each_training_is_followed_by_what_scores_its_translations() -> None:
    runs = [trained("bilingual_laptop", seed, {}, languages=["sw"]) for seed in (1, 0)]
    scores = {1: scored(runs[0], {"sw": 1.0}, {"sw": 1}, beam=1)}
    table = cells(commands_table([Cell("sw", runs[0], scores), Cell("sw", runs[1], {}), Cell("af", runs[0], {})]))
    scoring = "`python bleu.py runs/bilingual_laptop --beam 1`"
    assert table == [["af", "1", "`c`", ""], ["sw", "0", "`c`", ""], ["sw", "1", "`c`", scoring]]
    assert scoring_command(runs[0], 4) == "python bleu.py runs/bilingual_laptop --beam 4"
