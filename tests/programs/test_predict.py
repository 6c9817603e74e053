"""A trained model classifies images as it did in its evaluation."""

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image

from gpipe.checkpoint.manifest import seal
from gpipe.config.literally import take_literally
from gpipe.config.predict import LITERAL, PredictConfig
from gpipe.config.run import register_schemas, to_settings
from gpipe.data import open_image_set
from gpipe.programs.predict import open_classifier, start
from tests.support.program_server import run_program
from tests.support.train_program import ROOT, TINY, run_folder
from tests.support.train_program import start as start_training

NUM_IMAGES = 7
Predict = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run."""
    folder = tmp_path_factory.mktemp("trained")
    done = start_training(folder, *TINY)
    assert done.returncode == 0, done.stderr
    return run_folder(folder)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of images, one of them in a subfolder with a comma in its name."""
    folder = tmp_path / "photographs"
    (folder / "a, b").mkdir(parents=True)
    images = open_image_set("fashion_mnist_embedded", "test", None)
    for index in range(NUM_IMAGES):
        images.image(index).save(folder / ("a, b" if index == 0 else ".") / f"{index}.png")
    return folder


@pytest.fixture
def predict(run: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Predict]:
    """Predict in this process, and return what is printed, and what of it are warnings or an error."""

    def printed(*overrides: str) -> tuple[str, str]:
        words = take_literally([f"checkpoint={run}", *overrides], LITERAL)
        try:
            start(to_settings(compose("predict", overrides=words)))
        except SystemExit:
            pass
        except ValueError as error:
            return "", f"error: {error}"
        found = capsys.readouterr()
        return found.out, found.err

    register_schemas(PredictConfig, "predict_schema")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield printed


def test_the_probabilities_are_those_of_the_model(run: Path, images: Path, tmp_path: Path, predict: Predict) -> None:
    output, grid = tmp_path / "classes.csv", tmp_path / "grid.png"
    out, said = predict(f"images={images}", f"output={output}", f"grid={grid}", "top=10", "batch_size=3")
    assert out == "" and said == f"wrote the classes of 7 images to {output} and a picture of 7 images to {grid}\n"
    with output.open() as stream:
        rows = list(csv.DictReader(stream))
    paths = sorted(images.rglob("*.png"))
    assert [row["image"] for row in rows[::10]] == [str(path) for path in paths] and len(rows) == 10 * NUM_IMAGES
    names = (run / "classes.txt").read_text().splitlines()
    assert names == list(open_image_set("fashion_mnist_embedded", "test", None).class_names)
    model = open_classifier(str(run), torch.device("cpu"))
    for path, first in zip(paths, range(0, len(rows), 10), strict=True):
        with torch.no_grad():
            expected = model.layers(model.transform(Image.open(path))[None])[0].softmax(0)
        found = {row["class"]: float(row["probability"]) for row in rows[first : first + 10]}
        np.testing.assert_allclose([found[name] for name in names], expected, atol=1e-5)
        assert [int(row["rank"]) for row in rows[first : first + 10]] == list(range(1, 11))
        assert list(found.values()) == sorted(found.values(), reverse=True)
    with Image.open(grid) as picture:
        assert picture.format == "PNG" and picture.width > 500


def test_a_broken_image_is_left_out_with_a_warning(images: Path, predict: Predict) -> None:
    (images / "3.png").write_bytes(b"no image")
    out, warning = predict(f"images={images}", "top=1")
    assert len(out.splitlines()) == NUM_IMAGES - 1 and "3.png:" not in out
    assert warning.startswith(f"warning: cannot decode {images / '3.png'}") and len(warning.splitlines()) == 1


def test_answers_of_before_stay_where_no_image_can_be_decoded(images: Path, tmp_path: Path, predict: Predict) -> None:
    output = tmp_path / "classes.csv"
    output.write_text("answers of before")
    for path in images.rglob("*.png"):
        path.write_bytes(b"no image")
    out, said = predict(f"images={images}", f"output={output}", f"grid={tmp_path / 'grid.png'}")
    assert (out, said.splitlines()[-1]) == (
        "",
        f"error: images is {images}, where no image can be decoded: name other images.",
    )
    assert output.read_text() == "answers of before" and not (tmp_path / "grid.png").exists()


def test_what_was_written_is_told_beside_the_answers(images: Path, tmp_path: Path, predict: Predict) -> None:
    output, grid = tmp_path / "classes.csv", tmp_path / "grid.png"
    assert predict(f"images={images / '1.png'}")[1] == ""
    out, said = predict(f"images={images / '1.png'}", f"grid={grid}")
    assert out.startswith(f"{images / '1.png'}: ") and said == f"wrote a picture of 1 image to {grid}\n"
    (images / "3.png").write_bytes(b"no image")
    out, said = predict(f"images={images}", f"output={output}")
    assert out == "" and said.splitlines()[1:] == [f"wrote the classes of 6 of 7 images to {output}"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["images=nowhere"], "error: images is nowhere, which does not exist"),
        (["images=null"], "error: images is null, expected an image, or a folder of images"),
        (["images={folder}"], "error: images is {folder}, a folder without an image"),
        (["images={images}", "output={folder}"], "error: output is {folder}, a folder, expected a file"),
        (["images={images}", "grid=none/x.png"], "error: grid is none/x.png, in none, which does not exist"),
        (["images={images}", "top=0"], "error: top is 0, expected 1 or more"),
        (["images={images}", "checkpoint={folder}"], "error: checkpoint is {folder}, which has no checkpoint"),
    ],
)
def test_bad_input_is_one_sentence(
    images: Path, tmp_path: Path, predict: Predict, overrides: list[str], said: str
) -> None:
    places = {"folder": tmp_path / "empty", "images": images}
    places["folder"].mkdir()
    _, message = predict(*(word.format(**places) for word in overrides))
    assert message.startswith(said.format(**places)) and "\n" not in message.strip()


def test_images_in_hidden_folders_are_left_out(images: Path, predict: Predict) -> None:
    shown = predict(f"images={images}")
    for name in (".thumbnails", "@eaDir"):
        shutil.copytree(images / "a, b", images / name / "small")
    assert predict(f"images={images}") == shown


def test_images_in_linked_folders_are_read(images: Path, predict: Predict, tmp_path: Path) -> None:
    linked = tmp_path / "all" / "linked"
    linked.parent.mkdir()
    linked.symlink_to(images)
    found, shown = (predict(f"images={folder}")[0] for folder in (linked.parent, images))
    assert found == shown.replace(str(images), str(linked)) != ""


def test_the_program_prints_a_line_per_image(run: Path, images: Path) -> None:
    done = run_program(ROOT / "predict.py", f"checkpoint={run}", f"images={images / 'a, b'}", "top=2", warn="error")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{images / 'a, b' / '0.png'}: ") and line.count("%") == 2


def test_a_name_that_is_not_utf8_keeps_its_bytes(run: Path, tmp_path: Path, predict: Predict) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    image = open_image_set("fashion_mnist_embedded", "test", None).image(0)
    image.save(folder / "plain.png")
    (folder / "plain.png").rename(folder / os.fsdecode(b"caf\xe9.png"))
    output = tmp_path / "answers.csv"
    assert predict(f"images={folder}", f"output={output}")[1] == f"wrote the classes of 1 image to {output}\n"
    assert b"caf\xe9.png,1," in output.read_bytes()
    assert "caf\\udce9.png: " in predict(f"images={folder}")[0]


def rename_classes(run: Path, names: list[str] | None) -> None:
    """Give the classes of a run's checkpoint other names."""
    (path,) = (run / "checkpoints").glob("step-*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["config"]["class_names"] = names
    path.write_text(json.dumps(seal(manifest)))


def test_a_class_whose_name_looks_like_mathematics_is_drawn(
    run: Path, images: Path, tmp_path: Path, predict: Predict
) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    rename_classes(copied, [f"$1_$5_{label}" for label in range(10)])
    answers, _ = predict(f"checkpoint={copied}", f"images={images}", f"grid={tmp_path / 'grid.png'}")
    assert "$1_$5_" in answers and (tmp_path / "grid.png").exists()


def test_classes_without_names_are_numbered(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    rename_classes(copied, None)
    assert open_classifier(str(copied), torch.device("cpu")).class_names[:2] == ["class 0", "class 1"]


def test_classes_keep_names_with_other_ends_of_lines(run: Path, tmp_path: Path) -> None:
    names = [
        f"a{end}{number}" for number, end in enumerate(["\u0085", "\u2028", "\v", "\f", "\r", " ", "", "-", ".", ","])
    ]
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    rename_classes(copied, names)
    assert open_classifier(str(copied), torch.device("cpu")).class_names == names
