"""Random tokens: functions of split and index, loaded like any other data."""

import numpy as np
import pytest
import torch

from gpipe.data import RandomTokens, TokenLoader, check_data


def token_set(split: str = "train", num_sequences: int = 10) -> RandomTokens:
    return RandomTokens(split, num_sequences, 6, 50)


def loader(batch_size: int = 4, **settings: object) -> TokenLoader:
    return TokenLoader(token_set(), batch_size, 3, **({"shuffle": True} | settings))


def test_a_sequence_is_a_function_of_its_split_and_index() -> None:
    sequences = [token_set().sequence(index) for index in (0, 1, 1)] + [token_set("test").sequence(1)]
    assert all(len(sequence) == 7 and sequence.dtype == np.int64 for sequence in sequences)
    assert np.array_equal(sequences[1], sequences[2])
    assert not np.array_equal(sequences[0], sequences[1]) and not np.array_equal(sequences[1], sequences[3])
    assert np.array_equal(token_set(num_sequences=99).sequence(1), sequences[1])
    drawn = np.concatenate([RandomTokens("train", 9, 999, 50).sequence(index) for index in range(9)])
    assert (drawn.min(), drawn.max()) == (0, 49)
    assert np.bincount(drawn).min() > 9000 / 50 / 2


def test_targets_are_the_next_tokens() -> None:
    for inputs, targets in loader():
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape and inputs.shape[1] == 6
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_every_sequence_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    whole = {tuple(token_set().sequence(index)[:-1]) for index in range(10)}
    orders = []
    for epoch in (0, 1):
        each = loader()
        each.set_epoch(epoch)
        rows = [tuple(row.tolist()) for inputs, _ in each for row in inputs]
        assert len(rows) == 10 and set(rows) == whole
        orders.append(rows)
    assert orders[0] != orders[1]
    assert [len(inputs) for inputs, _ in loader()] == [4, 4, 2] and len(loader()) == 3


def test_replicas_share_a_mini_batch_and_a_resumed_epoch_goes_on() -> None:
    whole = list(loader(4))
    parts = [list(loader(2, replica_index=index, num_replicas=2)) for index in (0, 1)]
    for (inputs, _), (first, _), (second, _) in zip(whole, *parts, strict=True):
        assert torch.equal(inputs[0::2], first) and torch.equal(inputs[1::2], second)
    resumed = loader(4)
    resumed.batch_numbers = [2]
    assert [torch.equal(inputs, whole[2][0]) for inputs, _ in resumed] == [True]


def test_a_mini_batch_that_leaves_a_replica_without_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the last mini-batch has 1 sequence\(s\) for 3 replicas"):
        loader(1, num_replicas=3)


def test_what_is_made_up_is_never_missing() -> None:
    check_data("random_tokens")
    check_data("random_images")
