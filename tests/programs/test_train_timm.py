"""Models of timm on a folder of images: trained, resumed, exported to timm, begun with its weights, and refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants as hub
from hydra import compose
from PIL import Image
from safetensors.torch import load_file, save_file

import gpipe._compat.torchvision  # noqa: F401  (before timm)

# isort: split

import timm
from timm.data import create_transform, resolve_data_config

from gpipe.checkpoint.__main__ import main as checkpoint_program
from gpipe.config import read_yaml, to_run
from gpipe.data import open_image_set
from gpipe.programs.build import build_layers
from gpipe.programs.complete import complete
from gpipe.programs.predict import open_classifier
from gpipe.programs.workloads import workload_of
from tests.support.train_program import run_folder, start, train_here, weights

SIZE = 32
WORDS = (
    "+experiment=image_classification_laptop", "model.name=test_resnet", f"data.image_size={SIZE}",
    "trainer.max_steps=3", "trainer.batch_size=8", "trainer.evaluation.batch_size=8", "schedule.warm_up_epochs=0",
    "trainer.timeline_every_steps=null", "launch.num_processes=1", "launch.num_threads=1", "tracking=disabled",
)  # fmt: skip
NUM_IMAGES = {"train": 8, "val": 3}


def write_folder(root: Path, classes: tuple[str, ...] = ("cats", "dogs", "birds")) -> Path:
    generator = np.random.default_rng(0)
    for split, count in NUM_IMAGES.items():
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 120, (40, 48, 3)) + 60 * label
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("photographs"))


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    done = start(place, *WORDS, f"data.root={folder}")
    assert (done.returncode, done.stderr) == (0, "")
    return run_folder(place)


def export(run: Path, output: Path) -> Path:
    assert checkpoint_program(["export", str(run), "--output", str(output)]) == 0
    return output


def test_a_run_has_the_classes_of_the_folder_and_the_models_own_settings_of_images(trained: Path) -> None:
    data = read_yaml(trained / "config.yaml")["data"]
    own = timm.get_pretrained_cfg("test_resnet")
    assert (data["num_classes"], data["image_size"]) == (3, SIZE)
    assert (tuple(data["mean"]), tuple(data["std"]), data["interpolation"]) == (own.mean, own.std, own.interpolation)
    assert (data["center_crop"], data["keep_aspect"]) == (1.0, True)
    assert (trained / "classes.txt").read_text().split() == ["birds", "cats", "dogs"]


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    ("name", "keep_aspect"),
    [("test_resnet", True), ("dm_nfnet_f0", False), ("mobilevit_xxs", True), ("volo_d4_448", True)],
)
def test_an_image_that_is_no_square_is_evaluated_as_timm_does(name: str, keep_aspect: bool) -> None:
    words = [
        *WORDS,
        f"model.name={name}",
        "data.num_classes=2",
        "data.root=.",
        "data.image_size=90",
        "data.center_crop=null",
    ]
    run = complete(to_run(compose("train", overrides=words)))
    assert run.data.keep_aspect is keep_aspect
    across = np.linspace(0, 1, 300)[None, :] + 0.3 * np.sin(np.linspace(0, 9, 200))[:, None]
    image = Image.fromarray((200 * across / across.max()).astype(np.uint8)).convert("RGB")
    settings = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    theirs = create_transform(**settings | {"input_size": (3, 90, 90)})
    ours = workload_of(run).evaluation_transform()
    assert (ours(image) - theirs(image)).abs().mean() < 0.03  # of a standard deviation: timm resizes first


def test_timm_loads_what_was_trained_and_answers_alike(trained: Path, folder: Path, tmp_path: Path) -> None:
    path = export(trained, tmp_path / "model.safetensors")
    model = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(path)).eval()
    classifier = open_classifier(str(trained), torch.device("cpu"))
    images = torch.stack(
        [classifier.transform(open_image_set("image_folder", "test", folder).image(i)) for i in (0, 8)]
    )
    with torch.no_grad():
        assert torch.equal(classifier.layers(images), model(images))


def test_a_run_keeps_its_classes_and_says_where_others_have_their_numbers(folder: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(folder, data)
    words = (*WORDS, f"data.root={data}", f"hydra.run.dir={run}")
    assert start(tmp_path, *words).returncode == 0
    for split in ("train", "val"):
        (data / split / "cats").rename(data / split / "apes")
    said = "class 0 is birds in {}, and apes in the data"
    done = start(tmp_path, f"evaluate={run}")
    assert (done.returncode, done.stderr) == (
        0,
        f"warning: {said.format(run / 'checkpoints' / 'step-00000003')}: labels are compared by their numbers\n",
    )
    (run / "record.json").unlink()  # as that of a run that was stopped
    done = start(tmp_path, *words)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {said.format('run')}: resume with the same data")
    assert (run / "classes.txt").read_text().split() == ["birds", "cats", "dogs"]
    done = start(tmp_path, *words, f"trainer.resume_from={run}", "trainer.max_steps=9", "hydra.run.dir=another")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {said.format(run)}: resume with the same data")


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "words", [["pipeline.num_stages=1"], ["pipeline.num_stages=3", "pipeline.rematerialize=never"]], ids=" ".join
)
def test_the_weights_do_not_depend_on_the_number_of_stages(
    words: list[str], trained: Path, folder: Path, tmp_path: Path
) -> None:
    train_here(tmp_path, *WORDS, f"data.root={folder}", *words)
    here, there = weights(tmp_path / "runs" / "train" / "now" / "checkpoints" / ".."), weights(trained)
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        assert torch.equal(here[name], tensor), name


@pytest.mark.usefixtures("composer")
def test_a_resumed_run_is_the_unbroken_one(trained: Path, folder: Path, tmp_path: Path) -> None:
    (first, second) = tmp_path / "first", tmp_path / "second"
    words = (*WORDS, f"data.root={folder}", "schedule.name=constant")
    train_here(first, *words, "trainer.max_steps=2")
    train_here(second, *words, "trainer.max_steps=4", f"trainer.resume_from={first / 'runs' / 'train' / 'now'}")
    train_here(tmp_path, *words, "trainer.max_steps=4")
    resumed, whole = (weights(place / "runs" / "train" / "now") for place in (second, tmp_path))
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


@pytest.mark.usefixtures("composer")
def test_a_second_run_in_one_process_begins_with_the_initial_weights(folder: Path, tmp_path: Path) -> None:
    words = (*WORDS, f"data.root={folder}", "trainer.max_steps=1")
    held = build_layers(complete(to_run(compose("train", overrides=list(words)))))
    assert held is build_layers(complete(to_run(compose("train", overrides=list(words)))))
    train_here(tmp_path / "first", *words)
    train_here(tmp_path / "second", *words)
    first, second = (weights(tmp_path / place / "runs" / "train" / "now") for place in ("first", "second"))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize("num_classes", [3, 1000])
def test_training_begins_with_weights_of_timm_but_for_a_head_of_other_classes(
    num_classes: int, folder: Path, tmp_path: Path
) -> None:
    given = timm.create_model("test_resnet", num_classes=num_classes).state_dict()
    save_file(given, tmp_path / "timm.safetensors")
    still = ("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "ema.decay=null", "trainer.max_steps=1")
    train_here(tmp_path, *WORDS, f"data.root={folder}", *still, f"init_from={tmp_path / 'timm.safetensors'}")
    found = load_file(export(tmp_path / "runs" / "train" / "now", tmp_path / "model.safetensors"))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        if "running_" in name or "num_batches" in name:
            continue
        is_replaced = name.startswith("fc.") and num_classes != 3
        assert (found[name].shape != tensor.shape) if is_replaced else torch.allclose(found[name], tensor), name


@pytest.mark.usefixtures("composer")
def test_training_begins_with_a_run_of_another_image_size_and_other_classes(
    trained: Path, tmp_path: Path, folder: Path
) -> None:
    two = write_folder(tmp_path / "two", ("cats", "dogs"))
    words = (f"data.root={two}", "data.image_size=96", "pipeline.num_stages=3", f"init_from={trained}")
    train_here(tmp_path, *WORDS, *words, "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "ema.decay=null")
    given = load_file(export(trained, tmp_path / "given.safetensors"))
    found = load_file(export(tmp_path / "runs" / "train" / "now", tmp_path / "found.safetensors"))
    assert found.keys() == given.keys() and found["fc.weight"].shape[0] == 2
    for name, tensor in given.items():
        is_kept = not name.startswith("fc.") and "running_" not in name and "num_batches" not in name
        assert not is_kept or torch.allclose(found[name], tensor), name


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_broken_images_are_named_once_and_counted_in_all_replicas(tmp_path: Path, num_replicas: int) -> None:
    root = write_folder(tmp_path / "photographs")
    for number in (1, 5):
        (root / "train" / "cats" / f"{number}.png").write_bytes(b"no image")
    shape = (
        f"launch.num_replicas={num_replicas}", f"launch.num_processes={num_replicas}", "pipeline.num_stages=1",
        "pipeline.num_microbatches=1",
    )  # fmt: skip
    statistics = ("data.max_broken_images=2", "trainer.evaluation.statistics_batches=3")
    done = start(tmp_path, *WORDS, f"data.root={root}", *shape, *statistics)
    assert done.returncode == 0, done.stderr
    named = [line.partition(" (number")[0] for line in done.stderr.splitlines() if "cannot decode" in line]
    assert len(named) >= 2 and (num_replicas > 1 or len(set(named)) == len(named) == 2)
    assert json.loads((run_folder(tmp_path) / "record.json").read_text())["results"]["num_replaced"] == 2


@pytest.mark.usefixtures("composer")
def test_a_folder_without_val_is_shared_out(folder: Path, tmp_path: Path) -> None:
    train_here(tmp_path, *WORDS, f"data.root={folder / 'train'}", "data.validation_share=0.25")
    assert (tmp_path / "runs" / "train" / "now" / "record.json").exists()


@pytest.mark.usefixtures("composer")
def test_a_table_with_several_labels_is_trained_evaluated_and_predicted(folder: Path, tmp_path: Path) -> None:
    rows = [
        f"{path.relative_to(folder)},{'|'.join({path.parent.name, 'round'} - {'cats'})}"
        for path in sorted((folder / "train").rglob("*.png"))
    ]
    table = tmp_path / "table"
    table.mkdir()
    (table / "train").symlink_to(folder / "train")
    (table / "train.csv").write_text("\n".join(["path,labels", *rows]))
    words = ("data=image_table", f"data.root={table}", "data.validation_share=0.25", "data.num_workers=0")
    train_here(tmp_path, *WORDS, *words, "pipeline.num_stages=3")
    run = tmp_path / "runs" / "train" / "now"
    assert (run / "classes.txt").read_text().split() == ["birds", "dogs", "round"]
    results = json.loads((run / "record.json").read_text())["results"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    f1 = [line["test/f1"] for line in lines if "test/f1" in line][-1]
    assert 0 <= f1 <= 1 and 0 <= results["top1"] <= 1
    (classes,) = open_classifier(str(run), torch.device("cpu")).classify([Image.new("RGB", (40, 40))], 3)
    model = timm.create_model(
        "test_resnet", num_classes=3, checkpoint_path=str(export(run, tmp_path / "m.safetensors"))
    )
    assert sum(probability for _, probability in classes) != pytest.approx(1)
    assert len(classes) == 3 and model.fc.out_features == 3


def misname(root: Path) -> None:
    (root / "val" / "cats").rename(root / "val" / "lions")


def leave_empty(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


def leave_one_class(root: Path) -> None:
    for split in NUM_IMAGES:
        for name in ("dogs", "birds"):
            (root / split / name).rename(root / f"{split}-{name}")


@pytest.mark.parametrize(
    ("words", "damage", "said"),
    [
        (["model.name=resnet51"], None, "model.name is resnet51, which timm"),
        (
            ["model.name=resnet50.mine"],
            None,
            "model.name is resnet50.mine, but timm has no such pre-trained weights: set one of resnet50.a1_in1k, ",
        ),
        (["model.name=../weights"], None, "model.name is '../weights', expected a name that timm.list_models() has"),
        (["+model.arguments.checkpoint_path=x"], None, "model.arguments.checkpoint_path is x, but "),
        ([], misname, "has 3 class folders and {root}/val has 3, different in 'cats'; sort the val images"),
        ([], leave_empty, "The image set image_folder is missing."),
        ([], leave_one_class, "which has 1 class folders in {root}/train, expected 2 or more"),
        (["data.validation_share=0.1"], None, "data.validation_share is 0.1, but {root}/val has images for evaluation"),
        (["model.name=test_vit", "data.image_size=8"], None, "is test_vit, which does not become layers for images of"),
        (["+model.arguments.depths=3"], None, "is test_resnet, which timm cannot build for data.image_size=32"),
        (["data.root=null"], None, "data.num_classes is null, and the classes cannot be counted"),
    ],
    ids=lambda value: getattr(value, "__name__", " ".join(value) if isinstance(value, list) else ""),
)
def test_what_does_not_fit_is_refused_before_a_process_starts(
    words: list[str], damage: Callable[[Path], None] | None, said: str, tmp_path: Path
) -> None:
    root = write_folder(tmp_path / "photographs")
    if damage is not None:
        damage(root)
    dry = ["trainer.dry_run=true"] if "data.root=null" in words else []
    done = start(tmp_path, *WORDS, f"data.root={root}", *words, *dry)
    assert (done.returncode, done.stdout) == (1, "")
    assert said.format(root=root) in done.stderr.splitlines()[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("composer")
def test_weights_that_cannot_be_fetched_are_said_in_a_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "no_weights"))
    with pytest.raises(SystemExit) as end:
        train_here(tmp_path, *WORDS, f"data.root={folder}", "model.name=resnet10t", "model.pretrained=true")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: model.pretrained is true, but timm cannot fetch weights of resnet10t (")
    assert "init_from=<file>.safetensors" in said.splitlines()[0]
