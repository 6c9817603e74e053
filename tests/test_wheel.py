"""The wheel, unpacked in an empty folder: what is in it, and that it works outside of the repository."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = """
import sys, torch, gpipe
assert gpipe.__file__.startswith(sys.argv[1]), gpipe.__file__
block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
layers = gpipe.as_layers(torch.nn.TransformerEncoder(block, 2), torch.empty(2, 3, 8))
pipeline = gpipe.Pipeline(layers, torch.nn.functional.mse_loss, [1, len(layers) - 1], 2)
print(pipeline.train_step((torch.randn(4, 3, 8), torch.randn(4, 3, 8))).loss > 0)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"hydra", "timm", "torchvision", "wandb", "pydantic"}))
"""
DATA = """
from gpipe.data import open_corpus, open_image_set, open_tokenizer
tokenizer = open_tokenizer("multilingual_embedded", None)
corpus = open_corpus("multilingual_embedded", "train", tokenizer=tokenizer, languages=["de"], max_tokens=60)
print(len(open_image_set("fashion_mnist_embedded", "train")), len(corpus))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of what is committed, and unpack it as an installer does."""
    place = tmp_path_factory.mktemp("wheel")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    source = ROOT
    if archive.returncode == 0:  # else this is no clone, and setuptools may leave its folders behind
        source = place / "source"
        source.mkdir()
        subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*build, "--wheel-dir", place, source], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("gpipe_torch-*-py3-none-any.whl")
    ZipFile(wheel).extractall(place / "site")
    return place / "site"


def run(installed: Path, program: str) -> str:
    """Run a program in an empty folder; it sees the wheel and the packages here, and not the repository."""
    folder = installed.parent / "empty"
    folder.mkdir(exist_ok=True)
    packages = f"{installed}{os.pathsep}{sysconfig.get_paths()['purelib']}"
    # -S: else the environment's own link to the repository would come along.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(installed)],
        cwd=folder, env=os.environ | {"PYTHONPATH": packages}, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_engine_works_from_the_wheel_and_loads_torch_alone(installed: Path) -> None:
    assert run(installed, ENGINE).splitlines() == ["True", "[]"]


def test_the_embedded_data_and_the_types_are_in_the_wheel(installed: Path) -> None:
    assert (installed / "gpipe" / "py.typed").exists() and (installed / "gpipe_torch" / "py.typed").exists()
    images, pairs = run(installed, DATA).split()
    assert (images, int(pairs) > 300) == ("6000", True)


def test_the_wheel_has_the_packages_alone(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {
        "gpipe",
        "gpipe_torch",
    }
