"""Mini-batches of a torch Dataset: the order, what items draw, resuming, replicas, and workers."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from gpipe.data import DatasetLoader


class Numbers(Dataset):
    """Items that say their index, and what they draw."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], float]:
        return {"index": torch.tensor(index), "drawn": torch.rand(2)}, np.random.random()


def read(loader: DatasetLoader) -> list[tuple[list[int], list[float], list[float]]]:
    return [
        (inputs["index"].tolist(), inputs["drawn"].flatten().tolist(), targets.tolist()) for inputs, targets in loader
    ]


def test_an_epoch_shows_every_item_once_in_an_order_of_its_own() -> None:
    loader = DatasetLoader(Numbers(), 4, 0, shuffle=True)
    first = read(loader)
    assert len(loader) == 3 and [len(indices) for indices, _, _ in first] == [4, 4, 2]
    assert sorted(index for indices, _, _ in first for index in indices) == list(range(10))
    loader.set_epoch(1)
    assert read(loader) != first
    loader.set_epoch(0)
    assert read(loader) == first


def test_the_generators_of_the_process_stay_as_they_are() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    read(DatasetLoader(Numbers(), 4, 0, shuffle=True))
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_goes_on_where_it_stopped_with_any_number_of_workers(num_workers: int) -> None:
    whole = read(DatasetLoader(Numbers(), 4, 0, shuffle=True))
    loader = DatasetLoader(Numbers(), 4, 0, num_workers=num_workers, shuffle=True)
    loader.batch_numbers = range(1, len(loader))
    assert read(loader) == whole[1:]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"image": 1.0, "label": 2}, "a dict of 2 entries"),
        ((1.0, 2, 3), "a list of 3 entries"),
        (1.0, "of type Tensor"),
    ],
)
def test_items_that_are_no_pairs_are_refused_with_the_remedy(item: Any, said: str) -> None:
    loader = DatasetLoader([item] * 4, 2, 0, shuffle=True)
    with pytest.raises(TypeError, match=rf"^a mini-batch of the dataset is {said}, expected \(.*pass collate=, which"):
        next(iter(loader))


def test_a_dataset_without_a_length_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"^dataset is of type generator, which has no length: give one with a len"):
        DatasetLoader((item for item in Numbers()), 2, 0, shuffle=True)


def draw(items: list[tuple[dict[str, torch.Tensor], float]]) -> tuple[list[int], np.ndarray]:
    """Return the indices of the items, and what three generators draw."""
    return [int(item["index"]) for item, _ in items], np.array(
        [torch.rand(()).item(), np.random.rand(), random.random()]
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_collate_draws_follows_from_the_seed_the_epoch_and_the_mini_batch(num_workers: int) -> None:
    whole = DatasetLoader(Numbers(), 4, 0, shuffle=True, collate=draw)
    loader = DatasetLoader(Numbers(), 4, 0, num_workers=num_workers, shuffle=True, collate=draw)
    drawn = set()
    for epoch in range(2):
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        whole.set_epoch(epoch)
        loader.set_epoch(epoch)
        loader.batch_numbers = range(1, len(loader))
        expected = list(whole)
        for (indices, numbers), (found, again) in zip(expected[1:], loader, strict=True):
            assert found == indices and type(again) is np.ndarray and (again == numbers).all()
        drawn |= {number for _, numbers in expected for number in numbers}
        assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()
        assert before[2] == random.getstate()
    assert len(drawn) == 2 * 3 * 3


def test_replicas_share_each_mini_batch() -> None:
    whole = read(DatasetLoader(Numbers(), 4, 0, shuffle=True, drop_last=True))
    parts = [
        read(DatasetLoader(Numbers(), 2, 0, shuffle=True, drop_last=True, replica_index=r, num_replicas=2))
        for r in range(2)
    ]
    for (indices, _, _), *shares in zip(whole, *parts, strict=True):
        assert sorted(indices) == sorted(index for share in shares for index in share[0])


def test_every_option_has_to_be_one() -> None:
    with pytest.raises(TypeError, match="shuffle"):
        DatasetLoader(Numbers(), 2, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="drop_lats"):
        DatasetLoader(Numbers(), 2, 0, shuffle=True, drop_lats=True)  # type: ignore[call-arg]
