"""Train the small network as one process of a pipeline, or of several; started by torchrun.

    torchrun --nproc-per-node=3 train_and_save.py FOLDER REPLICAS [FAULT]

Trains 3 epochs, from the checkpoint in FOLDER if there is one, and prints the outcome as JSON from rank 0. With the
fault "data" the first stage cannot read its third mini-batch.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from small_run import NUM_LAYERS, RandomImages, small_trainer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gpipe.training.tracking import Tracker


class BrokenImages(RandomImages):
    """The third mini-batch cannot be read."""

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor]]:
        for number, batch in enumerate(super().__iter__()):
            if number == 2:
                raise OSError("photograph-17.png is broken")
            yield batch


def main(folder: Path, num_replicas: int, fault: str) -> None:
    dist.init_process_group("gloo")
    num_stages = dist.get_world_size() // num_replicas
    mesh = init_device_mesh("cpu", (num_replicas, num_stages), mesh_dim_names=("replica", "stage"))
    trainer = small_trainer(
        folder,
        [NUM_LAYERS - (num_stages - 1)] + [1] * (num_stages - 1),
        mesh=mesh,
        tracker=Tracker(folder, enabled=dist.get_rank() == 0, mode="disabled"),
        train_loader=BrokenImages() if fault == "data" and dist.get_rank() == 0 else RandomImages(),
    )
    resumed = trainer.resume()
    try:
        summary = trainer.train()
    except Exception as error:  # noqa: BLE001 - its sentence is what the test looks at
        sys.exit(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    if dist.get_rank() == 0:
        print(json.dumps({"resumed": resumed, **summary.as_dict()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:]))
