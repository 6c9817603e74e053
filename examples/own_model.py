"""Your own module and your own dataset, trained over two processes, saved, and resumed by the same command.

torchrun --nproc-per-node 2 examples/own_model.py
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset

import gpipe
from gpipe.data import DatasetLoader
from gpipe.training import Tracker, Trainer


class Waves(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        label = index % 3
        return torch.sin(torch.arange(64) * (label + 1) / 4 + index) + torch.randn(64), torch.tensor(label)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 3)

    def forward(self, waves: Tensor) -> Tensor:
        hidden = self.stem(waves).relu()
        return self.head(hidden + self.body(hidden).relu())


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_model")
init_process_group("gloo")
torch.manual_seed(0)  # the same initial weights in both processes
layers = gpipe.as_layers(Classifier(), torch.empty(8, 64))
partitions = gpipe.partition_layers([cost.flops for cost in gpipe.analyze_layers(layers, torch.empty(8, 64))], 2)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "stage"))
pipeline = gpipe.Pipeline(layers, nn.functional.cross_entropy, partitions, num_microbatches=4, mesh=mesh)
trainer = Trainer(
    pipeline=pipeline,
    optimizer=torch.optim.AdamW(pipeline.named_parameters(), lr=0.003),
    train_loader=DatasetLoader(Waves(), batch_size=64, seed=0, shuffle=True),
    evaluation_loaders={"test": DatasetLoader(Waves(), batch_size=250, seed=1, shuffle=False)},
    num_epochs=3,
    tracker=Tracker(folder, enabled=get_rank() == 0, mode="disabled"),  # folder/metrics.jsonl; or mode="offline": W&B
    checkpoint_folder=folder / "checkpoints",
    save_every_steps=20,
)
trainer.resume()
trainer.train()
pipeline.close()
destroy_process_group()
