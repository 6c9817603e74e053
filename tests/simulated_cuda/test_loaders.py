"""Images travel to a GPU as bytes, where nothing has to change their pixels before."""

import pytest

from tests.simulated_cuda.loaders import describe_loaders
from tests.simulated_cuda.machine import Machine


@pytest.mark.parametrize(
    ("word", "training"),
    [
        ("data.color_jitter=0", "torch.uint8"),
        ("data.color_jitter=0.4", "torch.float32"),
        ("data.mixup=0.8", "torch.float32"),
    ],
)
def test_test_images_are_bytes_and_so_are_training_images_that_are_only_cropped(
    word: str, training: str, simulated: Machine
) -> None:
    words = word, *(() if "color_jitter" in word else ("data.color_jitter=0",))
    (found,) = simulated.run(1, describe_loaders, words)
    assert found == {"training": training, "statistics": training, "test": "torch.uint8"}
