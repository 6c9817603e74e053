"""The translator as a user starts it, with a model that was trained for a few steps."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

from gpipe.checkpoint.manifest import Manifest
from gpipe.config import Device, register_schemas, to_run
from gpipe.config.literally import take_literally
from gpipe.config.run import to_settings
from gpipe.config.translate import LITERAL, TranslateConfig
from gpipe.data import Tokenizer, open_corpus
from gpipe.data.text.tokenizer import END
from gpipe.decoding.beam_search import BeamSearch
from gpipe.programs import bleu
from gpipe.programs.train import launch_training
from gpipe.programs.trained import TrainedModel, open_trained
from gpipe.programs.translate import start
from gpipe.records import read_records
from tests.programs.test_other_training import full_disk
from tests.programs.test_train_tokens import TINY as TINY_LANGUAGE_MODEL
from tests.support.program_server import run_program

ROOT = Path(__file__).parents[2]
TINY = (
    "+experiment=transformer_multilingual_laptop",
    "data.languages=[ga,io,de]",
    "data.max_tokens=40",
    "model.num_layers=1",
    "model.feedforward_size=16",
    "model.num_heads=2",
    "model.model_size=16",
    "model.head_size=8",
    "pipeline.num_stages=3",
    "pipeline.num_microbatches=2",
    "trainer.batch_size=400",
    "trainer.max_steps=3",
    "ema.decay=0.5",
    "launch.num_processes=1",
    "launch.device=cpu",
    "tracking=disabled",
)
Translate = Callable[..., str]


class WithoutFairseq:
    """Finds modules as if fairseq were not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "fairseq":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def trained(folder: Path, *overrides: str) -> Path:
    """Train in this process, and return the run's folder."""
    run = folder / "run"
    run.mkdir()
    register_schemas()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        launch_training(to_run(compose("train", overrides=list(overrides))), run, [])
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("translation"), *TINY)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("language"), *TINY_LANGUAGE_MODEL, "trainer.max_steps=1")


@pytest.fixture(scope="module")
def model(run: Path) -> TrainedModel:
    return open_trained(str(run), torch.device("cpu"))


@pytest.fixture
def translate(run: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Translate]:
    """Translate in this process, and return what is printed: the text, or the message of the error."""

    def printed(*overrides: str) -> str:
        checkpoint = [] if any(item.startswith("checkpoint=") for item in overrides) else [f"checkpoint={run}"]
        capsys.readouterr()
        try:
            words = take_literally(overrides, LITERAL, ["text"])
            start(to_settings(compose("translate", overrides=[*checkpoint, "max_length=40", *words])))
        except SystemExit:
            return capsys.readouterr().err
        except ValueError as error:
            return f"error: {error}"
        return capsys.readouterr().out

    register_schemas(TranslateConfig, "translate_schema")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield printed


def test_a_sentence_becomes_a_line_and_nothing_is_left_behind(run: Path, model: TrainedModel, tmp_path: Path) -> None:
    text = 'Guten Tag, "Welt" [1] ${x}!'
    arguments = (f"checkpoint={run}", f"text={text}", "beam=2", "max_length=40")
    done = run_program(ROOT / "translate.py", *arguments, folder=tmp_path, warn="error")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = BeamSearch(model.layers, 2, max_length=40).translate([model.tokenizer.encode(text)])
    assert done.stdout == " ".join(model.tokenizer.decode(found.tokens).split()) + "\n"
    assert list(tmp_path.iterdir()) == []


def test_the_model_comes_back_with_its_averages_and_its_tokenizer(model: TrainedModel, run: Path) -> None:
    manifest = Manifest.read(model.checkpoint)
    found = model.layers.state_dict(prefix="layers.")
    averages, weights = (
        {name: value for file in model.checkpoint.glob(f"{kind}-*") for name, value in load_file(file).items()}
        for kind in ("ema", "weights")
    )
    assert all(torch.equal(tensor, averages[name]) for name, tensor in found.items())
    assert not all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
    assert not model.layers.training and model.step == 3
    assert model.tokenizer.path == run / "tokenizer.model"
    assert model.tokenizer.sha256 == manifest.config["tokenizer_sha256"]


def test_line_n_of_a_file_is_the_translation_of_line_n(
    translate: Translate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["Guten Tag", "", "Alle Menschen sind frei und gleich an Würde und Rechten geboren.", "Ja"]
    text, output = tmp_path / "german.txt", tmp_path / "english.txt"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert translate(f"file={text}", f"output={output}") == ""
    found = output.read_text(encoding="utf-8").split("\n")
    assert found == [translate(f"text={line}").rstrip("\n") if line else "" for line in lines] + [""]
    assert translate(f"file={text}", "beam=1").count("\n") == 4


def test_empty_lines_are_warned_of(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "german.txt"
    text.write_text("Guten Tag\n\n \nJa", encoding="utf-8")
    register_schemas(TranslateConfig, "translate_schema")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        start(to_settings(compose("translate", overrides=[f"checkpoint={run}", f"file={text}"])))
    said = capsys.readouterr()
    assert said.err == f"warning: {text} has 2 empty lines, the first is line 2: empty lines stay empty.\n"
    assert said.out.count("\n") == 4


def test_a_file_that_was_written_is_told_beside_the_translations(run: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "german.txt", tmp_path / "english.txt"
    text.write_text("Guten Tag\nJa\n", encoding="utf-8")
    arguments = (f"checkpoint={run}", "beam=1", "max_length=40", f"output={output}")
    for words, count in ((f"file={text}", "2 lines"), ("text=Ja", "1 line")):
        done = run_program(ROOT / "translate.py", *arguments, words, folder=tmp_path, warn="error")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", f"wrote {count} to {output}\n")


def test_a_full_disk_is_said_and_leaves_an_earlier_file_as_it_is(translate: Translate, tmp_path: Path) -> None:
    output = tmp_path / "english.txt"
    output.write_text("earlier")
    words = ("text=Alle Menschen sind frei.", "beam=1")
    translate(*words)  # imports fairseq, which needs a disk
    with full_disk():
        said = translate(*words, f"output={output}")
    assert said.startswith(f"error: {output} cannot be written (File too large): make room there, or raise the limit")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["text=Hallo", "checkpoint=null"],
            "checkpoint is null, expected the run that trained the model: set checkpoint=",
        ),
        (
            ["text=Hallo", "checkpoint=nowhere"],
            "checkpoint is nowhere, which has no checkpoint: name a run's folder or",
        ),
        ([], "neither text nor file is set, expected one of them: set text="),
        (["text=Hallo", "file=x.txt"], "both text and file are set, expected one of them: set text="),
        (["text= "], "text is ' ', expected a sentence, or null: set text=... accordingly."),
        (
            ["text=" + 50 * "Hallo "],
            "text has 150 tokens, expected at most max_length=40: split the sentence, or raise",
        ),
        (["file=nowhere.txt"], "nowhere.txt cannot be read (No such file or directory): set file=<a text file>."),
        (["text=Hallo", "output=nowhere/a.txt"], "output is nowhere/a.txt, in nowhere, which does not exist, expected"),
        (
            ["text=Hallo", "output=/dev/null"],
            "output is /dev/null, a device or a pipe, expected a file in a",
        ),
        (["text=Hallo", "beam=0"], "beam is 0, expected 1 or more: set beam=... accordingly."),
        (
            ["text=Hallo", "beam=5000"],
            "beam is 5000, expected a number from 1 to 3999: set beam=... accordingly.",
        ),
        (["text=Hallo", "length_penalty=1e6"], "length_penalty is 1000000.0, expected a number from 0 to 10: set"),
        (["text=a\udcffb"], "text is 'a\\udcffb', which is not UTF-8: convert it to UTF-8."),
        (
            ["text=Hallo", "batch_size=9"],
            "batch_size is 9, expected max_length=40 or more: set batch_size=...",
        ),
        (["text=Hallo", "+colour=red"], "colour is unknown, expected one of batch_size, beam, checkpoint, "),
    ],
)
def test_bad_input_is_one_sentence(translate: Translate, overrides: list[str], said: str) -> None:
    message = translate(*overrides).strip()
    assert message.startswith(f"error: {said}") and "\n" not in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(translate: Translate) -> None:
    assert (
        translate("text=Hallo", "device=cuda") == "error: device is cuda, but there is no GPU here: set device=cpu.\n"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", " is empty, expected one sentence per line: write some into it."),
        (b"Hallo\nGr\xfc\xdfe\n", ", line 2, is not UTF-8: convert it to UTF-8."),
        (
            b"Hallo\n\n" + 50 * b"Hallo ",
            ", line 3, has 150 tokens, expected at most max_length=40: split the sentence, or",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_line(translate: Translate, tmp_path: Path, content: bytes, said: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    message = translate(f"file={text}")
    assert message.startswith(f"error: {text}{said}") and message.count("\n") == 1


def test_a_tokenizer_that_the_model_was_not_trained_with_is_refused(
    run: Path, translate: Translate, tmp_path: Path
) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    other = Tokenizer.train(["some other words", "and other lines"] * 30, 300, moved / "tokenizer.model")
    digests = (other.sha256[:12], Tokenizer(run / "tokenizer.model").sha256[:12])
    assert translate("text=Hallo", f"checkpoint={moved}") == (
        f"error: the tokenizer {moved / 'tokenizer.model'} has the SHA-256 {digests[0]}..., but "
        f"{moved / 'checkpoints' / 'step-00000003'} was trained with {digests[1]}...: put that tokenizer there.\n"
    )
    (moved / "tokenizer.model").unlink()  # then the one of the settings counts, which is the right one
    assert translate("text=Hallo", f"checkpoint={moved}") == translate("text=Hallo")


def test_a_model_that_does_not_translate_is_refused(language_model: Path, translate: Translate) -> None:
    other = language_model
    assert translate("text=Hallo", f"checkpoint={other}") == (
        f"error: checkpoint is {other}, which has a model of the family transformer_lm, expected "
        "translation_transformer: name a run that trained such a model.\n"
    )


def test_without_fairseq_the_command_that_installs_it_is_named(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fairseq"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutFairseq(), *sys.meta_path])
    message = translate("text=Hallo")
    assert message.startswith("error: fairseq") and message.count("\n") == 1
    assert "run `make translation`" in message


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world",
        "null",
        "[1",
        'a "b"',
        "a\\",
        'a\\"b',
        "x ${b} \\${c}",
        "it's",
        "a=b",
        "",
        "日本, {a: b}",
        "\\\\n",
    ],
)
def test_text_is_taken_literally(composer: None, text: str) -> None:
    register_schemas(TranslateConfig, "translate_schema")
    arguments = take_literally([f"text={text}", "file=null", "beam=2", "--cfg"], LITERAL, ["text"])
    composed = compose("translate", overrides=arguments[:-1])
    assert (composed.text, composed.file, composed.beam, arguments[-1]) == (text, None, 2, "--cfg")


def test_the_help_names_every_setting(composer: None) -> None:
    register_schemas(TranslateConfig, "translate_schema")
    text = OmegaConf.load(ROOT / "conf" / "translate.yaml").hydra.help.template
    assert all(re.search(rf"^ *{name}=", text, re.MULTILINE) for name in compose("translate"))
    assert "|".join(device.value for device in Device) in text and len(text.splitlines()) <= 40


def test_a_test_set_is_scored_a_language_and_a_group(
    run: Path, tmp_path: Path, model: TrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = open_corpus(
        "multilingual_embedded", "test", tokenizer=model.tokenizer, languages=model.data.languages, max_tokens=40
    )
    file = tmp_path / "bleu.jsonl"
    bleu.main([str(run), str(run / "checkpoints"), "--limit", "4", "--beam", "2", "--record", str(file)])
    (record, again) = read_records(file)
    rows, averages = record.results["languages"], record.results["averages"]
    assert (record.kind, record.experiment, record.seed) == ("measured", "bleu", 0)
    assert {**record.results, "seconds": 0} == {**again.results, "seconds": 0}
    assert str(tmp_path) not in record.command
    assert set(rows) == {"de", "ga", "io"} and all(row["num_sentences"] == 4 for row in rows.values())
    counts = {language: row["num_train_pairs"] for language, row in rows.items()}
    assert [row["group"] for _, row in sorted(rows.items(), key=lambda item: -counts[item[0]])] == [
        "high",
        "high",
        "low",
    ]
    assert averages["all"]["chrf"] == pytest.approx(sum(row["chrf"] for row in rows.values()) / 3)
    texts = bleu.translate_split(model, BeamSearch(model.layers, 2), corpus, 4)
    assert texts["ga"][1] == [model.tokenizer.decode(corpus.pair("ga", i)[1].tolist()) for i in range(4)]
    assert bleu.score_languages(texts, counts)["languages"] == rows
    table = capsys.readouterr().out
    assert all(f"│ {language} " in table for language in rows) and "BLEU: nrefs:1|case:mixed" in table


def test_a_number_of_hypotheses_that_there_are_not_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bleu.main([str(run), "--beam", "0"])
    said = "error: --beam is 0, expected a number from 1 to 3999: set --beam=... accordingly.\n"
    assert capsys.readouterr().err == said


def test_a_translation_may_be_as_long_as_the_sentences_that_the_model_was_trained_on(run: Path) -> None:
    """A model that never ends a sentence shows the limit."""
    assert bleu.choose_search(40)["max_length"] == 256
    model = open_trained(str(run), torch.device("cpu"))
    model.layers[-1].register_forward_hook(lambda layer, inputs, logits: logits.index_fill(-1, torch.tensor(END), -1e9))
    search = BeamSearch(model.layers, 1, **bleu.choose_search(400))
    (found,) = search.translate([[5] * 200])
    assert len(found.tokens) == 400


def test_a_language_that_the_model_does_not_know_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bleu.main([str(run), "--languages", "fr"])
    assert capsys.readouterr().err == "error: --languages has fr, which the model was not trained on: leave it out.\n"
