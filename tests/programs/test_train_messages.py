"""What the program says before it trains, and instead: the plan, warnings, and errors in one message."""

import re
import shutil
from pathlib import Path

import pytest

from tests.data.images.small_sets import write_oxford_pets
from tests.support.program_server import run_program
from tests.support.train_program import TINY, TRAIN, run_folder, start, train_here


@pytest.mark.reliability
def test_an_error_in_a_process_ends_the_run_with_one_message(tmp_path: Path) -> None:
    write_oxford_pets(tmp_path / "sets")
    data = ("data=oxford_pets", f"data.root={tmp_path / 'sets'}", "data.num_classes=9", "data.num_workers=0")
    done = start(tmp_path, *TINY, *data, "launch=process_per_stage")  # else it hangs: pytest's time-out
    assert done.returncode == 1
    sentence = "error: data.num_classes is 9, but oxford_pets has 3: set data.num_classes=3.\n"
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 2
    assert "Traceback" in (run_folder(tmp_path) / "error.txt").read_text()


def test_classes_that_the_data_do_not_have_are_said_before_anything_is_built(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "data.num_classes=9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: data.num_classes is 9, but fashion_mnist_embedded has 10: set data.num_classes=10.\n"
    for split in ("train", "val"):
        for name in ("cats", "dogs", "birds"):
            (tmp_path / "sets" / split / name).mkdir(parents=True)
    done = start(tmp_path, *TINY, "data=image_folder", f"data.root={tmp_path / 'sets'}", "data.num_classes=9")
    assert "error: data.num_classes is 9, but image_folder has 3: set data.num_classes=3.\n" in done.stderr


def test_missing_data_is_said_before_anything_is_built(tmp_path: Path) -> None:
    done = start(tmp_path, "+experiment=amoebanet_imagenet")
    assert (done.returncode, done.stdout) == (1, "")
    for said in ("imagenet is missing", "Looked for", "Expected tree", "How to get it", "fashion_mnist_embedded"):
        assert said in done.stderr
    assert done.stderr.count("error") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("composer")
def test_a_set_of_other_numbers_than_the_papers_trains_with_a_warning_that_has_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_oxford_pets(tmp_path / "sets")
    data = ("data=oxford_pets", f"data.root={tmp_path / 'sets'}", "data.num_classes=3", "data.num_workers=0")
    train_here(tmp_path, *TINY, *data, "trainer.batch_size=5", "pipeline.num_microbatches=1")
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("warning: ") == 3
    assert "warning: oxford_pets has 3 classes, but Table 4 of the paper says 37" in said.out
    assert "warning: oxford_pets has 5 training images, but Table 4 of the paper says 3,680" in said.out


def test_the_plan_of_the_full_size_model_needs_no_data_and_no_memory(tmp_path: Path) -> None:
    done = start(tmp_path, "+experiment=amoebanet_imagenet", "trainer.dry_run=true")
    assert (done.returncode, done.stderr) == (0, "")
    evaluated = "557,277,864 parameters in the network that is evaluated"  # paper.md, section 2
    assert f"{evaluated}, 559,063,693 with the auxiliary head of training." in done.stdout
    assert "K=4 stages, M=32 micro-batches of 32" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (
            "model.num_filter=3",
            "error: model.num_filter is unknown, expected one of auxiliary_head, ",
        ),
        ("+model.num_filter=3", "error: model.num_filter is unknown, expected one of auxiliary_head"),
        ("experiment=transfer", "error: experiment is not chosen by default: write +experiment=..., with a plus.\n"),
        (
            "data.root=grün",
            "error: data.root=grün cannot be read: correct it, or write \"data.root='grün'\", with both",
        ),
        ("seed", "error: seed has no value: write seed=... .\n"),
        (
            "data.root=a,b",
            "error: data.root has the values a,b: add -m to train.py for a run with each, write 'data.root=[a,b]' for ",
        ),
        ("seed=${seed}", "error: seed is ${seed}: Recursive interpolation detected: correct it.\n"),
        (
            "hydra.run.dir=${nothing}",
            "error: hydra.run.dir is ${nothing}: Interpolation key 'nothing' not found: correct it.\n",
        ),
        ("seed=???", "error: seed is not set, expected a value: set seed=... .\n"),
        ("+data=digits", "error: data is chosen already: write data=..., without a plus.\n"),
        (
            "debug=null",
            "error: debug=null, expected the name of a file of that group: correct that word, or leave it out.",
        ),
        (
            "tracking=none",
            "error: tracking=none is unknown, expected one of disabled, offline, online, tensorboard: co",
        ),
        ("+experiment=[transfer,none]", "error: experiment=none is unknown: correct its name.\n"),
        ("hydra.run.dir=/etc/hostname/x", "error: /etc/hostname/x cannot be made or opened (Not a directory): name "),
    ],
)
def test_wrong_input_is_one_message_and_status_1(tmp_path: Path, argument: str, said: str) -> None:
    done = start(tmp_path, *TINY, argument)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr and "HYDRA_FULL_ERROR" not in done.stderr


def test_an_interval_without_a_search_is_one_message_with_what_to_write(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "-m", "optimizer.learning_rate=interval(0.1,0.2)")
    assert (done.returncode, done.stdout) == (1, "")
    sentence = "error: interval(...) is a value of a sweep, but only a search draws from it: write the values to try, "
    assert done.stderr == f"{sentence}separated by commas, or add +search=learning_rate.\n"


def test_a_setting_of_another_data_set_names_its_group(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "data.validation_share=0.1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: data.validation_share is unknown, expected one of ")
    assert done.stderr.endswith(": correct its name, or choose the data=... that has it.\n")


def test_hydras_own_help_is_printed(tmp_path: Path) -> None:
    done = start(tmp_path, "--hydra-help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--cfg" in done.stdout


@pytest.mark.usefixtures("composer")
def test_a_model_that_cannot_be_cut_so_is_one_message_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        train_here(tmp_path, *TINY, "pipeline.num_stages=10")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: pipeline.num_stages is 10, but the model has 9 layers: set it to 9 or less.")
    assert "Traceback" not in said


@pytest.mark.parametrize("program", ["plan.py", "predict.py", "translate.py"])
def test_each_program_names_a_setting_that_is_unknown(tmp_path: Path, program: str) -> None:
    done = run_program(TRAIN.with_name(program), "devise=h100", folder=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"error: devise is unknown, expected one of .*: correct its name\.\n", done.stderr)


@pytest.mark.parametrize(
    ("program", "name", "said"),
    [
        (
            "plan.py",
            "palm",
            "--config-name is palm, but neither conf/ nor the folder of --config-dir has a file palm.yaml",
        ),
        (
            "train.py",
            "plan",
            "--config-name is plan, the configuration of plan.py, but train.py composes the configuration train",
        ),
        ("predict.py", "translate", "translate.yaml inherits from translate_schema, which this program does not have"),
        ("translate.py", "predict", "predict.yaml inherits from predict_schema, which this program does not have"),
    ],
)
def test_each_program_refuses_a_wrong_main_file(tmp_path: Path, program: str, name: str, said: str) -> None:
    done = run_program(TRAIN.with_name(program), "--config-name", name, folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: {re.escape(said)}: correct .*, or leave .*--config-name.*\.\n", done.stderr)


def test_a_wrong_key_in_the_file_of_plan_py_is_named(tmp_path: Path) -> None:
    conf = shutil.copytree(TRAIN.with_name("conf"), tmp_path / "conf")
    with (conf / "plan.yaml").open("a") as file:
        file.write("efficency: 0.5\n")
    done = run_program(TRAIN.with_name("plan.py"), "--config-path", str(conf), folder=tmp_path)
    expected = "error: In 'plan': efficency: Key 'efficency' not in 'PlanConfig': correct it there.\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.parametrize("word", ["model.arguments={depth: 2}", "model.arguments.depth=2"])
def test_an_argument_of_a_librarys_model_is_added_with_a_plus(tmp_path: Path, word: str) -> None:
    done = start(tmp_path, "+experiment=language_model_laptop", word)
    assert done.returncode == 1
    said = "model.arguments.depth is not set yet: add it with a plus, as a separate word: +model.arguments.depth=... ."
    assert done.stderr == f"error: {said}\n"


def test_a_plan_for_a_gpu_that_is_not_here_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "trainer.dry_run=true", "launch.device=cuda")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "error: launch.device is cuda, but torch finds no GPU here: plan for one with plan.py"
    )


@pytest.mark.parametrize("said", [True, False])
def test_a_run_of_what_is_a_sweep_says_so(tmp_path: Path, said: bool) -> None:
    rate = ["optimizer.learning_rate=0.1"] if said else []
    done = start(tmp_path, *TINY, "+search=learning_rate", "trainer.dry_run=true", *rate)
    assert done.returncode == 0
    assert ("a sweep over optimizer.learning_rate: add -m" in done.stdout) is not said


def test_a_loss_of_an_evaluation_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "optimizer.learning_rate=1e9", "trainer.max_steps=1")
    assert done.returncode == 1
    assert re.search(
        r"error: the loss on test after step \d is (nan|inf) \(the state is saved\): lower the", done.stderr
    )


def test_a_checkpoint_that_is_not_there_is_said_before_anything_is_built(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "init_from=nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "error: init_from is nowhere, which has no checkpoint: name a run's folder or a checkpoint's.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_word_for_a_sweep_may_stand_anywhere(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "trainer.dry_run=true", "-m", "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert "2 done; the table is in" in done.stdout


@pytest.mark.parametrize("dry_run", [True, False])
def test_fewer_images_than_a_mini_batch_has_are_refused_by_the_settings_alone(tmp_path: Path, dry_run: bool) -> None:
    done = start(tmp_path, *TINY, "data.max_images=15", f"trainer.dry_run={dry_run}")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: data.max_images is 15, expected 16 or more, which is trainer.batch_size: raise"
    )


def test_a_run_that_has_saved_nothing_yet_is_said_to_be_one(tmp_path: Path) -> None:
    done = start(tmp_path, *TINY, "trainer.checkpoints.keep=null", "trainer.max_steps=1")
    assert done.returncode == 0, done.stderr
    run = run_folder(tmp_path).relative_to(tmp_path)
    done = start(tmp_path, *TINY, f"init_from={run}")
    assert done.stderr.startswith(f"error: init_from is {run}, a run without a checkpoint yet: wait for one, or name")
