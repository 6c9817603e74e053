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


# The first two merge the same files.
LINES = (
    (LAPTOP, "seed=1"), (LAPTOP, "seed=2"), (LAPTOP, "pipeline=interleaved"), (LAPTOP, "debug=overfit"), (),
    ("+experiment=transformer_multilingual_laptop",),
)  # fmt: skip


@pytest.mark.usefixtures("composer")
def test_what_is_read_back_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compose_all() -> list[object]:
        configs = [compose("train", list(words), return_hydra_config=True) for words in LINES]
        return [OmegaConf.to_container(config, resolve=False) for config in configs]

    with monkeypatch.context() as patch:
        patch.delenv(REMEMBERED, raising=False)
        patch.setattr(ConfigRepository, "load_config", remembered_settings._load)
        expected = compose_all()
    monkeypatch.setenv(REMEMBERED, str(tmp_path))
    for _ in ("merged", "read back"):
        assert compose_all() == expected
        assert len(list(tmp_path.glob("merged-*"))) == len(LINES) - 1


def test_folders_and_interpolations_are_those_of_the_program(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        words = "--cfg", "all", "--resolve", LAPTOP, "name=${oc.env:SOME_NAME}"
        done = run_program(ROOT / "train.py", *words, folder=tmp_path / name, SOME_NAME=name)
        assert done.returncode == 0, done.stderr
        assert f"\nname: {name}\n" in done.stdout and f"cwd: {tmp_path / name}" in done.stdout
