"""Measure how long saving a checkpoint stops a training, beside torch.distributed.checkpoint.

    python -m experiments.checkpoint_cost

Two processes train one stage of linear layers each, with AdamW and moving averages: 16 bytes per parameter. With
--device cuda each has a GPU, and on one GPU one process trains all layers. Three ways to save take turns while training
continues. All flush their files to the disk; ours also hashes them. Training is paused during a call that saves, or
that waits for a save before an update. The slower process counts, and the median over the rounds. Five minutes, and 3
GB of disk.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from experiments.program import StudyProgram
from experiments.turns import take_turns
from gpipe import Pipeline
from gpipe.checkpoint.content import Content
from gpipe.checkpoint.manifest import Position
from gpipe.checkpoint.saver import Saver
from gpipe.training.checkpoints import get_tensors, wrap_optimizer
from gpipe.training.ema import Ema
from gpipe.training.optimizers import build_optimizer
from reproductions import ROOT
from reproductions.bubble.saves import CHECKPOINT_COST, DCP_ASYNCHRONOUS, DCP_SYNCHRONOUS, OURS, TABLES

MOST_PROCESSES, NUM_LAYERS, BATCH_SIZE = 2, 8, 8


class Training:
    """A stage in training, and the three ways to save it."""

    def __init__(self, device: str, width: int, folder: Path) -> None:
        layers = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(NUM_LAYERS)))
        num_stages = dist.get_world_size()
        mesh = init_device_mesh("cpu", (1, num_stages), mesh_dim_names=("replica", "stage"))
        partitions = [NUM_LAYERS // num_stages] * num_stages
        self.pipeline = Pipeline(
            layers, nn.functional.mse_loss, partitions, 2, rematerialize="never", mesh=mesh, devices=device
        )
        self.optimizer = build_optimizer("adamw", self.pipeline.named_parameters(), 1e-4)
        self.ema = Ema(self.pipeline.layers)
        self.batch = torch.randn(BATCH_SIZE, width), torch.randn(BATCH_SIZE, width)
        self.folder = folder
        self.saver = Saver(folder / "ours", self.pipeline, keep=1)
        self.still = 0.0
        self.step()

    def step(self) -> list[Any]:
        """Make an update; return the status of the current save on each process."""
        self.optimizer.zero_grad()
        statuses = self.pipeline.train_step(self.batch, note=self.saver.status).notes
        start = time.perf_counter()
        self.saver.wait_until_copied()
        self.still += time.perf_counter() - start
        self.optimizer.step()
        self.ema.update(self.pipeline.step)
        return statuses

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything to save, by name."""
        kinds = {**get_tensors(self.pipeline, self.ema), "optimizer": wrap_optimizer(self.optimizer).read()}
        return {f"{kind}: {name}": tensor for kind, part in kinds.items() for name, tensor in part.items()}

    def save_ours(self) -> tuple[float, float]:
        """Save while training continues; return the seconds of standing still, and until all is on the disk."""
        start, self.still = time.perf_counter(), 0.0
        position = Position(self.pipeline.step, 0, self.pipeline.step, 0)
        self.saver.save(Content(position, get_tensors(self.pipeline, self.ema), wrap_optimizer(self.optimizer)))
        saving = time.perf_counter() - start
        while self.saver.status() is not None:
            self.saver.check(self.step())
        return saving + self.still, time.perf_counter() - start

    def save_synchronously(self) -> tuple[float, float]:
        """Save with DCP while training waits."""
        start = time.perf_counter()
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(self.folder / "synchronous", overwrite=True))
        return (time.perf_counter() - start,) * 2

    def save_asynchronously(self) -> tuple[float, float]:
        """Save with DCP while training continues."""
        start = time.perf_counter()
        writer = dcp.FileSystemWriter(self.folder / "asynchronous", overwrite=True)
        future: Any = dcp.async_save(self.state(), storage_writer=writer)
        still = time.perf_counter() - start
        while not all(self.pipeline.job.gather(future.done())):
            self.step()
        future.result()
        return still, time.perf_counter() - start


def measure(
    rank: int, num_processes: int, port: int, device: str, width: int, rounds: int, folder: Path, results: Any
) -> None:
    """Let the three ways to save take turns, in one of the processes."""
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_processes)
    if device == "cuda":
        torch.cuda.set_device(rank)
    training = Training(device, width, folder)
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        OURS: training.save_ours,
        DCP_SYNCHRONOUS: training.save_synchronously,
        DCP_ASYNCHRONOUS: training.save_asynchronously,
    }
    num_bytes = sum(training.pipeline.job.gather(sum(tensor.nbytes for tensor in training.state().values())))

    def time_slowest(save: Callable[[], tuple[float, float]]) -> list[float]:
        training.pipeline.job.gather(training.pipeline.job.wait_for_devices())
        return [max(column) for column in zip(*training.pipeline.job.gather(save()), strict=True)]

    turns = {name: partial(time_slowest, save) for name, save in ways.items()}
    seconds = take_turns(turns, rounds, "rounds" if rank == 0 else None)  # the first allocates memory for the copies
    rows = []
    for name, found in seconds.items():
        still, total = (statistics.median(column) for column in zip(*found, strict=True))
        rate = num_bytes / total
        rows.append({"saver": name, "still_seconds": still, "total_seconds": total, "bytes_per_second": rate})
    if rank == 0:
        results.put((num_bytes, rows))
    training.pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    program = StudyProgram(__doc__, {"bubble": TABLES}, rounds=11, what_rounds_are="saves in each way")
    program.parser.add_argument("--width", type=int, default=2048, help="of the layers; 2048 makes 537 MB")
    program.parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the layers are")
    options = program.parse()
    num_gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    if options.device == "cuda" and num_gpus == 0:
        program.parser.error("--device is cuda, but torch finds no GPU here.")
    num_processes = min(MOST_PROCESSES, num_gpus or MOST_PROCESSES)
    queue = torch.multiprocessing.get_context("forkserver").SimpleQueue()
    (ROOT / "runs").mkdir(exist_ok=True)  # on a disk, where the system's temporary folder may be memory
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as temporary:
        arguments = num_processes, 29660, options.device, options.width, options.rounds, Path(temporary), queue
        torch.multiprocessing.start_processes(measure, arguments, num_processes, start_method="forkserver")
    size, measured = queue.get()
    config = {"num_bytes": size, "num_processes": num_processes, "rounds": options.rounds, "width": options.width}
    gpus = [torch.cuda.get_device_name(index) for index in range(min(num_processes, num_gpus))]
    program.publish_record(CHECKPOINT_COST.make_record(config, {"rows": measured}, gpus=gpus))
