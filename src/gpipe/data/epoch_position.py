"""Where an iteration over an epoch's mini-batches starts."""


class EpochPosition:
    """What loaders of any data share: the seed, the epoch, and this process's place among the replicas.

    A subclass sets `_num_batches`, the number of mini-batches an epoch.

    num_replaced: in the place of how many examples, which are broken, this process has put others in that iteration.
    wait_seconds: how long the current epoch's iteration has waited for data so far.
    start_batch: the first mini-batch of the next iteration, to resume within an epoch; set_epoch puts it back to 0.
    stride: how many mini-batches further the following one is, so that replicas can share an evaluation set out;
        set_epoch puts it back to 1.

    Raises ValueError for a negative seed, and for a replica_index outside 0 .. num_replicas - 1.
    """

    _num_batches: int

    def __init__(self, seed: int, replica_index: int, num_replicas: int) -> None:
        if seed < 0:
            raise ValueError(f"seed {seed} must not be negative")
        if not 0 <= replica_index < num_replicas:
            raise ValueError(f"replica_index {replica_index} must lie in 0 to num_replicas - 1 = {num_replicas - 1}")
        self._seed = seed
        self._replica_index, self._num_replicas = replica_index, num_replicas
        self.epoch = 0
        self.start_batch = 0
        self.stride = 1
        self.wait_seconds = 0.0
        self.num_replaced = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from its first mini-batch on."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch} must not be negative")
        self.epoch = epoch
        self.start_batch = 0
        self.stride = 1

    def close(self) -> None:
        """End what an iteration keeps for the next one."""

    def __len__(self) -> int:
        """Return the number of mini-batches an epoch, whatever start_batch is."""
        return self._num_batches

    def _check_start(self) -> None:
        if not 0 <= self.start_batch <= len(self):
            raise ValueError(f"start_batch {self.start_batch} must lie in 0 to {len(self)}, the number of mini-batches")
