"""Mini-batches of token sequences for one process of the training."""

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gpipe.data.epoch_loader import EpochLoader
from gpipe.data.text.tokens import TokenSet


class TokenLoader(EpochLoader):
    """Yield the mini-batches of an epoch: (tokens, the token after each), both int64 [n, time], on every stage.

    Looking tokens up costs next to nothing, so there are neither worker processes nor stages that are spared.
    The arguments are those of EpochLoader. Raises ValueError for wrong settings.
    """

    def __init__(
        self,
        token_set: TokenSet,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        replica_index: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            len(token_set),
            batch_size,
            seed,
            shuffle=shuffle,
            replica_index=replica_index,
            num_replicas=num_replicas,
            drop_last=drop_last,
            noun="sequence",
        )
        self._token_set = token_set

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mini-batches from start_batch on."""
        parts = self._parts()
        self.wait_seconds = 0.0
        for indices in parts:
            started = time.perf_counter()
            sequences = torch.from_numpy(np.stack([self._token_set.sequence(int(index)) for index in indices]))
            inputs, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
            self.wait_seconds += time.perf_counter() - started
            yield inputs, targets
