"""Which runs have the calibration of each other's layers."""

import pytest
from hydra import compose

from gpipe.config import to_run
from gpipe.launch import devices
from gpipe.planning.accelerator import find_accelerator
from gpipe.programs.calibration_files import describe_origin, find_path
from tests.programs.small_runs import LANGUAGE_MODEL, SMALL, TRANSLATION

pytestmark = pytest.mark.usefixtures("composer")
IMAGES = (*SMALL, "model.num_layers=3")
ALL_CORES = (*IMAGES, "launch=process_per_stage", "launch.num_threads=null")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "own_cores", lambda: list(range(8)))


def path(*words: str) -> str:
    run = to_run(compose("train", overrides=list(words)))
    return str(find_path(describe_origin(run, find_accelerator("cpu"))))


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (LANGUAGE_MODEL, ("data.vocabulary_size=41",)),
        (LANGUAGE_MODEL, ("trainer.label_smoothing=0.2",)),
        (TRANSLATION, ("trainer.label_smoothing=0.2",)),
        (IMAGES, ("data.num_classes=11",)),
        (IMAGES, ("trainer.channels_last=true",)),
        (IMAGES, ("trainer.compile=true",)),
        (IMAGES, ("launch.num_threads=2",)),
        (ALL_CORES, ("pipeline.num_stages=3",)),
    ],
)
def test_layers_or_kernels_that_were_not_run_are_not_taken_for_measured(
    words: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert path(*words) != path(*words, *others)


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (IMAGES, ("pipeline.num_stages=2", "pipeline.schedule=1f1b", "launch=process_per_stage")),
        (IMAGES, ("pipeline.num_microbatches=8", "trainer.batch_size=32", "optimizer=adam", "seed=1")),
        (IMAGES, ("trainer.channels_last=false",)),
        ((*ALL_CORES, "pipeline.num_stages=2"), ("launch.num_threads=4",)),
    ],
)
def test_what_leaves_the_layers_as_they_are_leaves_their_calibration(
    words: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert path(*words) == path(*words, *others)
