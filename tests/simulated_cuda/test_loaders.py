"""Images travel to a GPU as bytes, where nothing has to change their pixels before."""

from tests.simulated_cuda.loaders import describe_loaders
from tests.simulated_cuda.machine import Machine

TRAINING = {
    ("data.color_jitter=0",): "torch.uint8",
    ("data.color_jitter=0.4",): "torch.float32",
    ("data.color_jitter=0", "data.mixup=0.8"): "torch.float32",
}


def test_test_images_are_bytes_and_so_are_training_images_that_are_only_cropped(simulated: Machine) -> None:
    (found,) = simulated.run(1, describe_loaders, list(TRAINING))
    for words, training, loaders in zip(TRAINING, TRAINING.values(), found, strict=True):
        assert loaders == {"training": training, "statistics": training, "test": "torch.uint8"}, words
