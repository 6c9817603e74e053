"""Training on the same mini-batches again and again."""

import torch

from gpipe.training.loader import RepeatedLoader
from tests.training.small_run import RandomImages


def test_every_epoch_has_the_first_mini_batches_of_the_first_in_turn_and_loads_them_once() -> None:
    inner = RandomImages()
    first = [batch for _, batch in zip(range(3), RandomImages(), strict=False)]
    loader = RepeatedLoader(inner, 3)
    for epoch in (1, 0):
        loader.set_epoch(epoch)
        found = list(loader)
        assert len(found) == len(loader) == len(inner)
        for number, (images, labels) in enumerate(found):
            expected_images, expected_labels = first[number % 3]
            assert images is not None and expected_images is not None
            assert torch.equal(images, expected_images) and torch.equal(labels, expected_labels)
    assert inner.num_fetched == 3


def test_it_goes_on_within_an_epoch_and_takes_every_so_many() -> None:
    loader = RepeatedLoader(RandomImages(), 2)
    every = [labels for _, labels in loader]
    loader.set_epoch(0)
    loader.batch_numbers = [1, 3]
    assert [labels.tolist() for _, labels in loader] == [labels.tolist() for labels in every[1::2]]


def test_more_mini_batches_than_there_are_are_all() -> None:
    assert len([*RepeatedLoader(RandomImages(), 99)]) == len(RandomImages())
