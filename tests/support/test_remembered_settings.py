"""What is read back is what Hydra composes, in the folder and with the environment of the program that asks."""

from pathlib import Path

import pytest
from hydra import compose
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

from tests.support import remembered_settings
from tests.support.program_server import REMEMBERED, run_program

ROOT = Path(__file__).parents[2]
LAPTOP = "+experiment=amoebanet_imagenet_laptop"


@pytest.mark.usefixtures("composer")
@pytest.mark.parametrize(
    "words",
    [
        (),
        (LAPTOP,),
        (LAPTOP, "pipeline=interleaved"),
        (LAPTOP, "debug=overfit"),
        ("+experiment=transformer_multilingual_laptop",),
    ],
    ids=" ".join,
)
def test_what_is_read_back_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    def composed(seed: int) -> object:
        config = compose("train", [*words, f"seed={seed}"], return_hydra_config=True)
        return OmegaConf.to_container(config, resolve=False)

    with monkeypatch.context() as patch:
        patch.delenv(REMEMBERED, raising=False)
        patch.setattr(ConfigRepository, "load_config", remembered_settings._load)
        first, second = composed(1), composed(2)
    monkeypatch.setenv(REMEMBERED, str(tmp_path))
    assert (composed(1), len(list(tmp_path.glob("merged-*")))) == (first, 1)
    assert (composed(2), len(list(tmp_path.glob("merged-*")))) == (second, 1)


def test_folders_and_interpolations_are_those_of_the_program(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        words = "--cfg", "all", "--resolve", LAPTOP, "name=${oc.env:SOME_NAME}"
        done = run_program(ROOT / "train.py", *words, folder=tmp_path / name, SOME_NAME=name)
        assert done.returncode == 0, done.stderr
        assert f"\nname: {name}\n" in done.stdout and f"cwd: {tmp_path / name}" in done.stdout
