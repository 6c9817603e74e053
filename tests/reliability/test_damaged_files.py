"""Every file of a checkpoint: a flipped bit, a truncation and a deletion are all noticed, by loading and by verify."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe.checkpoint.errors import CheckpointError
from gpipe.checkpoint.manifest import MANIFEST, Manifest, Position
from gpipe.checkpoint.read import find_damage
from tests.training.small_run import small_run

FILES = [MANIFEST, *(f"{kind}-{stage}.safetensors" for kind in ("weights", "ema", "optimizer") for stage in (0, 2))]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = small_run((1, 2, 3))
    run.train(2)
    path = run.save(tmp_path_factory.mktemp("good"), Position(2, 0, 2, 0), config={"seed": 0}, results={"top1": 0.5})
    assert {file.name for file in path.iterdir()} == set(FILES)
    return path


def copied(good: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(good, folder)


def flip(path: Path, place: float, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


def assert_noticed(checkpoint: Path, file: str) -> None:
    """Loading refuses in one line that names the file and changes nothing; verify names it too."""
    run = small_run((2, 4), seed=1)
    before = run.tensors()
    with pytest.raises(CheckpointError) as raised:
        run.load(checkpoint)
    message = str(raised.value)
    assert "\n" not in message and str(checkpoint) in message and file in message
    for name, tensor in run.tensors().items():
        assert torch.equal(tensor, before[name]), name
    (damage,) = find_damage(checkpoint)
    assert file in damage


@pytest.mark.parametrize("place", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("file", [name for name in FILES if name != MANIFEST])
def test_a_flipped_bit_is_noticed(good: Path, tmp_path: Path, file: str, place: float) -> None:
    checkpoint = copied(good, tmp_path / "step-00000002")
    flip(checkpoint / file, place)
    assert_noticed(checkpoint, file)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("file", FILES)
def test_a_truncation_is_noticed(good: Path, tmp_path: Path, file: str, share: float) -> None:
    checkpoint = copied(good, tmp_path / "step-00000002")
    path = checkpoint / file
    os.truncate(path, int(share * path.stat().st_size))
    assert_noticed(checkpoint, file)


@pytest.mark.parametrize("file", FILES)
def test_a_deletion_is_noticed(good: Path, tmp_path: Path, file: str) -> None:
    checkpoint = copied(good, tmp_path / "step-00000002")
    (checkpoint / file).unlink()
    assert_noticed(checkpoint, file)


def link_elsewhere(path: Path) -> None:
    shutil.copy(path, path.parents[1] / path.name)
    path.unlink()
    path.symlink_to(f"../{path.name}")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("put", [link_elsewhere, pipe, folder])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_of_the_folder_is_not_opened(
    good: Path, tmp_path: Path, file: str, put: Callable[[Path], None]
) -> None:
    checkpoint = copied(good, tmp_path / "step-00000002")
    put(checkpoint / file)
    assert_noticed(checkpoint, file)


@given(place=st.floats(0, 1), bit=st.integers(0, 7))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_bit_flipped_anywhere_in_the_manifest_is_noticed(good: Path, tmp_path: Path, place: float, bit: int) -> None:
    checkpoint = copied(good, tmp_path / "step-00000002")
    flip(checkpoint / MANIFEST, place, bit)
    # A space that became another blank says nothing else.
    assert find_damage(checkpoint) != [] or Manifest.read(checkpoint) == Manifest.read(good)


def test_every_digit_of_the_manifest_counts(good: Path, tmp_path: Path) -> None:
    text = (good / MANIFEST).read_bytes()
    checkpoint = copied(good, tmp_path / "step-00000002")
    for place in [place for place, byte in enumerate(text) if chr(byte).isdigit()][::7]:
        changed = bytearray(text)
        changed[place] ^= 1
        (checkpoint / MANIFEST).write_bytes(changed)
        with pytest.raises(CheckpointError, match="not a valid manifest"):
            Manifest.read(checkpoint)
