"""The program on sentences: a tiny T(L, H, A) from end to end, gone on from its checkpoint, and what is refused."""

import gc
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose

from experiments import deep_or_wide
from gpipe.checkpoint.manifest import Manifest
from gpipe.config import RunConfig, to_run
from gpipe.data import SPLITS, Tokenizer, open_corpus, open_tokenizer, split_of
from gpipe.data.text.multilingual_text import read_embedded
from gpipe.data.text.sentences import Sentences
from gpipe.decoding.resource_groups import resource_groups
from gpipe.programs import layout
from gpipe.programs.build import build_layers
from gpipe.programs.train import launch_training
from gpipe.programs.workloads import workload_of
from gpipe.records import read_records
from tests.data.text.small_text import write_parallel
from tests.programs.test_translate import TINY
from tests.support.train_program import metrics, run_folder, start, weights

pytestmark = pytest.mark.usefixtures("composer")
MODELS = {"t6_8192_16": 1, "t12_16384_32": 2, "t24_8192_16": 4, "t32_16384_32": 8, "t64_16384_32": 16}


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose("train", overrides=list(overrides)))


def trained(folder: Path, *overrides: str) -> Path:
    """Train in this process, in a folder like a user's, which is returned."""
    run = folder / "runs" / "transformer_multilingual_laptop" / "now"
    run.mkdir(parents=True)
    launch_training(run_of(*TINY, *overrides), run, [])
    return folder


@pytest.fixture(scope="module")
def three_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    done = start(folder, *TINY, "launch.num_processes=3", "model.tied=all", "trainer.evaluation.raw=true")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"warning: train: skipped [\d,]+ pairs longer than 40 tokens \(data.max_tokens\)", done.stdout)
    figures = r"top-1 [\d.]+%, loss [\d.]+( \(top-1 [\d.]+% without averaging the weights\))?"
    assert re.search(rf"{figures} on the valid sentences after 3 steps in ", done.stdout)
    assert "de/loss" not in done.stdout  # languages are in the log and in the record
    assert "python translate.py checkpoint=" in done.stdout
    return folder


def test_a_run_leaves_the_loss_of_each_language_and_its_tokenizer(three_processes: Path) -> None:
    folder = run_folder(three_processes)
    (record,) = read_records(folder)
    valid = record.results["evaluation"]["valid"]
    assert {"loss", "top1", "de/loss", "ga/top1", "io/loss"} < valid.keys()
    assert {key for key in valid if key.startswith("raw_")} == {"raw_loss", "raw_top1"} and len(valid) == 10
    assert record.results["least_loss"] == {**valid, "step": 3}
    assert record.results["tokens_per_second"] > record.results["examples_per_second"] > 0
    steps = [line for line in metrics(three_processes) if "nll" in line]
    assert [line["step"] for line in steps] == [1, 2, 3] and steps[0]["clipped"] == 0
    assert math.isclose(steps[0]["nll"], math.log(4000), rel_tol=0.1)
    kept = Tokenizer(folder / "tokenizer.model")
    ours = open_tokenizer("multilingual_embedded", None)
    assert ours is not None and kept.sha256 == ours.sha256
    (manifest,) = folder.glob("checkpoints/*/manifest.json")
    assert Manifest.read(manifest.parent).config["tokenizer_sha256"] == ours.sha256


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(three_processes: Path, tmp_path: Path) -> None:
    """One process goes on where three stopped."""
    more = ("model.tied=all", "trainer.max_steps=5")
    whole = trained(tmp_path / "whole", *more)
    rest = trained(tmp_path / "rest", *more, f"trainer.resume_from={run_folder(three_processes)}")
    assert [line["step"] for line in metrics(rest) if "nll" in line] == [1, 2, 3, 4, 5]
    assert metrics(rest) == metrics(three_processes) + metrics(whole)[-3:]
    expected, found = weights(run_folder(whole)), weights(run_folder(rest))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_plain_text_is_tokenised_by_one_of_three_processes_and_trains_the_same(
    three_processes: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for language in ("ga", "io", "de"):
        for split in SPLITS:
            pairs = [(pair.source, pair.target) for pair in read_embedded()[language] if split_of(pair.target) == split]
            write_parallel(text, split, language, pairs)
    settings = ("data.name=parallel_text", f"data.root={text}", f"data.cache={tmp_path / 'ids'}", "model.tied=all")
    done = start(tmp_path, *TINY, *settings, "launch.num_processes=3", "trainer.evaluation.raw=true")
    expected = [f"{split}.{language}-en" for split in ("train", "valid") for language in ("de", "ga", "io")]
    lines = [f"reading {name} into {tmp_path / 'ids'}, once" for name in expected]
    assert (done.returncode, done.stderr.splitlines()) == (0, lines)
    assert metrics(tmp_path) == metrics(three_processes)
    ours, theirs = weights(run_folder(tmp_path)), weights(run_folder(three_processes))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(("is_first", "is_last"), [(True, False), (False, True), (False, False)])
def test_only_the_first_and_the_last_stage_hold_sentences(is_first: bool, is_last: bool) -> None:
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is Sentences}
    workload = workload_of(run_of(*TINY))
    job = SimpleNamespace(replica_index=0, num_replicas=1)
    pipeline = SimpleNamespace(is_first=is_first, is_last=is_last, job=job)
    train_loader = workload.train_loader(pipeline, pin_memory=False)
    evaluation_loaders = workload.evaluation_loaders(pipeline, pin_memory=False)
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is Sentences and id(each) not in before]
    assert bool(held) == (is_first or is_last)
    for loader in (train_loader, *evaluation_loaders.values()):
        inputs, targets = next(iter(loader))
        assert (inputs is not None, targets is not None) == (is_first, is_last)
        assert len(list(loader)) == len(loader)
    assert workload.make_metrics() is not None and len(workload.warnings()) > 0


@pytest.mark.parametrize("setting", ["trainer.resume_from", "init_from"])
def test_a_checkpoint_of_another_tokenizer_is_refused(
    setting: str, three_processes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(three_processes)
    words = [f"Satz {number} von vielen; sentence {number} of many" for number in range(500)]
    other = Tokenizer.train(words, 300, tmp_path / "other.model")
    settings = [f"data.tokenizer={other.path}", "data.vocabulary_size=300", f"{setting}={folder}"]
    with pytest.raises(SystemExit):
        trained(tmp_path, "model.tied=all", "trainer.max_steps=6", *settings)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {setting} is {folder}, whose tokenizer has the SHA-256 0240a209753f..., but this")
    assert f"{other.sha256[:12]}...: set data.tokenizer to the one in the folder" in error


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.languages=[de,xx]", "data.languages has 'xx', which the corpus multilingual_embedded does not have:"),
        ("data.vocabulary_size=99", "data.vocabulary_size is 99, but multilingual_embedded has 4000 tokens: set "),
        ("trainer.batch_size=30", "trainer.batch_size is 30 tokens, less than the longest sentence of 40 tokens"),
    ],
)
def test_data_that_do_not_fit_are_one_sentence(
    override: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trained(tmp_path, override)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("name", "num_stages"), MODELS.items())
def test_the_models_of_section_5_have_the_papers_number_of_accelerators(name: str, num_stages: int) -> None:
    run = run_of("+experiment=transformer_multilingual", f"model=translation_{name}")
    assert run.pipeline.num_stages == run.launch.num_processes == num_stages
    assert run.pipeline.num_microbatches == 64 >= 4 * num_stages


def test_the_small_models_from_wide_to_deep_are_of_equal_size() -> None:
    depths, sizes = [], []
    for model in deep_or_wide.MODELS:
        layers = build_layers(run_of("+experiment=deep_or_wide_laptop", f"model=translation_{model}"))
        depths.append(len(layers))
        sizes.append(sum(parameter.numel() for parameter in layers.parameters() if parameter.ndim > 1))
    assert depths == sorted(set(depths)) and len(depths) == 5
    assert len(set(sizes)) == 1


def test_a_translation_is_planned_in_sentences() -> None:
    run = run_of("+experiment=transformer_multilingual", "model=translation_t12_16384_32")
    accelerator = layout.accelerator_at_hand(run)
    plan = layout.build_planner(run, accelerator).plan(layout.build_setting(run, accelerator))
    assert (plan.setting.num_microbatches, plan.microbatch_size) == (64, 16)  # of 256 tokens
    assert sum(plan.partitions) == 28 and plan.parameters == 1_239_171_072


@pytest.mark.parametrize(("num_tokens", "num_replicas", "num_sentences"), [(256, 2, 1), (768, 2, 2), (768, 3, 1)])
def test_each_replica_is_planned_with_a_longest_sentence_at_least(
    num_tokens: int, num_replicas: int, num_sentences: int
) -> None:
    run = run_of(
        "model=translation_small",
        "data=multilingual_embedded",
        f"trainer.batch_size={num_tokens}",
        f"launch.num_replicas={num_replicas}",
        f"launch.num_processes={num_replicas}",
        "pipeline.num_stages=1",
        "pipeline.num_microbatches=1",
    )
    accelerator = layout.accelerator_at_hand(run)
    plan = layout.build_planner(run, accelerator).plan(layout.build_setting(run, accelerator))
    assert (plan.microbatch_size, plan.batch_size) == (num_sentences, num_sentences * num_replicas)


def test_the_bilingual_sweep_is_of_the_low_resource_half() -> None:
    overrides = ["+experiment=bilingual_laptop"]
    sweep = compose("train", overrides=overrides, return_hydra_config=True).hydra.sweeper.params
    data = run_of(*overrides).data
    tokenizer = open_tokenizer(data.name, None)
    corpus = open_corpus(data.name, "train", tokenizer=tokenizer, languages=None, max_tokens=data.max_tokens)
    pairs = dict(zip(corpus.languages, corpus.num_pairs().tolist(), strict=True))
    assert re.findall(r"\[(\w+)\]", sweep["data.languages"]) == resource_groups(pairs)["low"]
    assert sweep.seed == "0,1,2"
