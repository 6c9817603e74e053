"""Compare each recomputation with its forward, layer by layer, to look for faults.

The next stage has computed with the forward's outputs. If the recomputed ones differ, the gradients are wrong, and
nothing else shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RecomputationCheck:
    """Keeps a number for the bits of each layer's outputs until they are recomputed."""

    def __init__(self) -> None:
        self._forwards: dict[tuple[int, int], list[int]] = {}

    def note(self, micro_batch: int, layer: int, outputs: Sequence[Tensor]) -> None:
        """Note the outputs of a forward that will be recomputed."""
        self._forwards[micro_batch, layer] = [_hash(tensor) for tensor in outputs]

    def compare(self, micro_batch: int, layer: int, outputs: Sequence[Tensor]) -> None:
        """Compare the outputs of a recomputation; a micro-batch that was not noted is not compared.

        Raises:
            ValueError: they differ from those of the forward.
        """
        expected = self._forwards.pop((micro_batch, layer), None)
        if expected is None or (found := [_hash(tensor) for tensor in outputs]) == expected:
            return
        raise ValueError(
            f"the recomputed outputs have the hashes {found}, but those of the forward, which the next stage has used, "
            f"had {expected}; let the layer draw random numbers only in its forward, keep state that a forward changes "
            "only in buffers, and use deterministic kernels (trainer.deterministic=true), or set rematerialize='never'"
        )

    def reset(self) -> None:
        """Forget all forwards."""
        self._forwards.clear()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = 0x2545F4914F6CDD1D  # spreads bits over 64; from Marsaglia's generators


@torch.no_grad()
def _hash(tensor: Tensor) -> int:
    """Return a number for a tensor's bits and their places; torch.hash_tensor misses swapped and repeated values."""
    bits = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    bits = bits.view(_INTEGERS.get(tensor.itemsize, torch.int64)).long()
    mixed = bits * _ODD
    mixed ^= mixed >> 29
    mixed *= torch.arange(len(bits), device=bits.device) * 2 + 1
    return int(mixed.sum())
