"""Train the small network as one process of a pipeline, or of several; started by torchrun.

    torchrun --nproc-per-node=2 train_and_save.py FOLDER

Trains 3 epochs, from the checkpoint in FOLDER if there is one. As a script, the first stage cannot read its third
mini-batch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gpipe.training.tracking import Tracker
from tests.training.small_run import NUM_LAYERS, RandomImages, small_trainer


class BrokenImages(RandomImages):
    """The third mini-batch cannot be read."""

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor]]:
        for number, batch in enumerate(super().__iter__()):
            if number == 2:
                raise OSError("photograph-17.png is broken")
            yield batch


def train(rank: int, folder: Path, num_replicas: int = 1, *, is_broken: bool = False) -> dict[str, Any]:
    """Train and save as one process of the group, and return the outcome."""
    num_stages = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    trainer = small_trainer(
        folder,
        [NUM_LAYERS - (num_stages - 1)] + [1] * (num_stages - 1),
        mesh=mesh,
        tracker=Tracker(folder, enabled=rank == 0, mode="disabled"),
        train_loader=BrokenImages() if is_broken and rank == 0 else RandomImages(),
    )
    resumed = trainer.resume()
    summary = trainer.train()
    trainer.pipeline.close()
    return {"resumed": resumed, **summary.as_dict()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train(dist.get_rank(), Path(sys.argv[1]), is_broken=True)
    except Exception as error:  # noqa: BLE001 - its sentence is what the test looks at
        sys.exit(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    dist.destroy_process_group()
