"""Language models on a folder of text: ours, and one of transformers, which loads what was trained."""

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpipe.checkpoint.__main__ import main as checkpoint_program
from gpipe.checkpoint.folder import find_checkpoint
from gpipe.checkpoint.manifest import Manifest
from gpipe.checkpoint.read import load_layers
from gpipe.config import ConfigError, read_yaml
from gpipe.config.saved import from_plain
from gpipe.data import Tokenizer
from gpipe.programs.build import build_layers
from tests.support.train_program import run_folder, start, train_here, weights

WORDS = (
    "data=text_folder", "data.sequence_length=12", "data.validation_share=0.2", "trainer.max_steps=3",
    "trainer.batch_size=4", "trainer.evaluation.batch_size=16", "trainer.evaluation.max_batches=2",
    "trainer.timeline_every_steps=null", "schedule.warm_up_epochs=0", "launch.num_threads=1", "launch.device=cpu",
    "tracking=disabled",
)  # fmt: skip
GPT2 = ("model=transformers", "+model.arguments.n_layer=2", "+model.arguments.n_embd=16", "+model.arguments.n_head=2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(f"The number {n} follows {n - 1}." for n in range(1, 300)))
    return folder


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    done = start(place, *WORDS, *GPT2, f"data.root={text}")
    assert (done.returncode, done.stderr) == (0, "")
    return run_folder(place)


def test_a_run_has_the_tokenizers_vocabulary_and_keeps_the_tokenizer(trained: Path) -> None:
    assert read_yaml(trained / "config.yaml")["data"]["vocabulary_size"] == 4000
    assert (trained / "tokenizer.model").stat().st_size > 1000
    lines = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    (loss,) = (line["test/loss"] for line in lines if "test/loss" in line)
    assert 0 < loss < 20


def test_transformers_loads_what_was_trained_and_answers_alike(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpt2" / "model.safetensors"
    assert checkpoint_program(["export", str(trained), "--output", str(output)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(output.parent).eval()
    other = tmp_path / "another" / "model.safetensors"
    other.parent.mkdir()
    (other.parent / "config.json").write_text("{}")
    assert checkpoint_program(["export", str(trained), "--output", str(other)]) == 1
    assert "config.json exists, and is another model's: name a file in another folder" in capsys.readouterr().err
    assert [path.name for path in other.parent.iterdir()] == ["config.json"]
    assert type(model).__name__ == "GPT2LMHeadModel"
    checkpoint = find_checkpoint(trained)
    assert checkpoint is not None
    for place, name in ((checkpoint.parent, "latest"), (checkpoint, "."), (checkpoint, f"../{checkpoint.name}")):
        with chdir(place):
            relative = tmp_path / f"{place.name}{len(name)}" / "model.safetensors"
            assert checkpoint_program(["export", name, "--output", str(relative)]) == 0
        assert (relative.parent / "config.json").read_bytes() == (output.parent / "config.json").read_bytes()
    layers = build_layers(from_plain(Manifest.read(checkpoint).config))
    load_layers(checkpoint, layers)
    tokens = torch.randint(4, 4000, (2, 12))
    with torch.no_grad():
        assert torch.equal(layers.eval()(tokens), model(tokens).logits)


def test_an_evaluation_with_another_tokenizer_is_refused(trained: Path, text: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.model"
    shutil.copy(trained / "tokenizer.model", given)
    words = [word for word in WORDS if word.startswith("data") or word == "trainer.evaluation.max_batches=2"]
    words += [f"evaluate={trained}", f"data.root={text}", f"data.tokenizer={given}", "launch.device=cpu"]
    done = start(tmp_path, *words)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (text / "text.txt").read_text().splitlines()
    other = Tokenizer.train(lines, 320, given)
    done = start(tmp_path, *words)
    assert done.returncode == 1, done.stderr
    said = r"error: evaluate is \S+, whose tokenizer has the SHA-256 \w+\.\.\., but this run's has "
    assert re.match(said + other.sha256[:12], done.stderr)


@pytest.mark.usefixtures("composer")
def test_the_weights_do_not_depend_on_the_number_of_stages(trained: Path, text: Path, tmp_path: Path) -> None:
    train_here(tmp_path, *WORDS, *GPT2, f"data.root={text}", "pipeline.num_stages=3")
    here, there = weights(tmp_path / "runs" / "train" / "now"), weights(trained)
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert torch.equal(here[name], tensor), name


@pytest.mark.usefixtures("composer")
def test_training_begins_with_weights_that_transformers_saved(text: Path, tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=4000)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "given")
    given = load_file(tmp_path / "given" / "model.safetensors")
    save_file(given, tmp_path / "weights.safetensors", {"tokenizer_sha256": tokenizer_of(text, tmp_path)})
    still = ("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "ema.decay=null", "trainer.max_steps=1")
    train_here(tmp_path, *WORDS, *GPT2, f"data.root={text}", *still, f"init_from={tmp_path / 'weights.safetensors'}")
    output = tmp_path / "found" / "model.safetensors"
    assert checkpoint_program(["export", str(tmp_path / "runs" / "train" / "now"), "--output", str(output)]) == 0
    found = load_file(output)
    assert given.keys() <= found.keys()
    for name, tensor in given.items():
        assert torch.allclose(found[name], tensor), name


def tokenizer_of(text: Path, tmp_path: Path) -> str:
    from gpipe.data import open_text_tokenizer

    return open_text_tokenizer(None).sha256


@pytest.mark.usefixtures("composer")
def test_transformer_l_trains_on_text(text: Path, tmp_path: Path) -> None:
    small = ("model=transformer_lm_small", "model.num_layers=2", "model.model_size=16", "model.feedforward_size=16")
    train_here(tmp_path, *WORDS, *small, f"data.root={text}")
    assert (tmp_path / "runs" / "train" / "now" / "record.json").exists()


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.name=resnet50"], r"model.name is resnet50, expected a type of language model that transformers has"),
        (["+model.arguments.n_positions=8"], r"data.sequence_length is 12, but gpt2 has 8 positions: lower it"),
        (["+model.arguments.n_head=3"], r"model.arguments do not make a valid gpt2 \("),
        (["+model.arguments.vocab_size=3"], r"model.arguments.vocab_size is 3, but data and init_from determine it"),
        (["model=transformer_lm_small", "data=fashion_mnist_embedded"], r"tokens, such as data=text_folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_refused_in_a_sentence(
    words: list[str], said: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {word.partition("=")[0].lstrip("+") for word in words}
    given = [word for word in (*WORDS, *GPT2) if word.partition("=")[0].lstrip("+") not in changed]
    if "model=transformer_lm_small" in words:
        given = [word for word in given if not word.startswith(("+model", "data."))]
    root = [f"data.root={text}"] if "data=fashion_mnist_embedded" not in words else []
    with pytest.raises((SystemExit, ConfigError)) as end:
        train_here(tmp_path, *given, *root, *words)
    message = capsys.readouterr().err if isinstance(end.value, SystemExit) else str(end.value)
    assert re.search(said, message.splitlines()[0]), message
