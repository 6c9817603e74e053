"""train.py with a fault in it: GPIPE_FAULT='<fault as JSON>' python tests/reliability/faulty_run.py <overrides>.

The program runs as a user starts it; in the process of one rank, at one moment, the damage is done by a hook of a
layer, by the loader, by a worker of the loader, or while a checkpoint is flushed.
"""
# ruff: noqa: E402

from gpipe.launch import garbage_collection

garbage_collection.pause()  # as train.py does, which this stands for

import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe.launch.processes import Place
from gpipe.programs import train as run
from gpipe.training.loader import number_batches
from tests.support.calling_backward import CallingBackward

ROOT = Path(__file__).parents[2]
STEP = 3  # finished steps at the moment of the damage in a step
MICRO_BATCH = 2
NOTES_SECONDS = 1.0  # what a process does is on the notice board by then
TRAIN = run.train_in_process


class Broken(ArithmeticError):
    """What `raise` raises."""


def do(action: str, folder: Path) -> None:
    """Do the damage, and note when."""
    if action in ("kill", "exit", "stop"):
        time.sleep(NOTES_SECONDS)
    (folder / "damage").write_text(repr(time.time()))
    if action == "raise":
        raise Broken("on purpose")
    if action == "memory":
        raise MemoryError("on purpose")
    if action == "allocate":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.zeros(2**30)
    if action == "exit":
        os._exit(0)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # hang


def in_layer(pipeline: Any, place: str, action: Callable[[], None]) -> None:
    """Plant a fault in the last layer of this process, at MICRO_BATCH of the step after STEP, or of an evaluation."""
    calls = {"forward": 0, "backward": 0, "evaluation": 0}

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        phase = "evaluation" if not module.training else "backward" if gpipe.is_recomputing() else "forward"
        if phase != place or (phase != "evaluation" and pipeline.step != STEP):
            return None
        calls[phase] += 1
        if phase == "backward":  # recomputed from the last of the 4 micro-batches on
            return (CallingBackward.apply(inputs[0], action),) if calls[phase] == 4 - MICRO_BATCH else None
        if calls[phase] == MICRO_BATCH + 1:
            action()
        return None

    list(pipeline.layers.values())[-1].register_forward_pre_hook(hook)


def in_loader(loader: Any, action: Callable[[], None]) -> None:
    """Plant a fault before the loader's mini-batch STEP."""
    kind = type(loader)

    def batches(self: Any) -> Iterator[Any]:
        for number, batch in zip(number_batches(self), kind.__iter__(self), strict=True):
            if number == STEP:
                action()
            yield batch

    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": batches})


class WorkerTransform:
    """A transform that does damage at an image of the first mini-batch, in the process that decodes it."""

    def __init__(self, transform: Any, action: str, folder: Path) -> None:
        self.transform, self.action, self.folder = transform, action, folder
        self.calls = 0

    def __call__(self, image: Any) -> Tensor:
        self.calls += 1
        if self.calls == 8:
            do(self.action, self.folder)
        return self.transform(image)


def in_save(action: Callable[[], None]) -> None:
    """Plant a fault where the second checkpoint is flushed to the disk."""
    flush, flushed = os.fsync, set[str]()

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = Path(f"/proc/self/fd/{number}").readlink()
        if "checkpoints" in str(path) and path.suffix == ".safetensors":
            flushed.add(path.parent.name)
            if len(flushed) == 2:
                action()
        flush(descriptor)

    os.fsync = fsync


def before_save(saver: Any, folder: Path) -> None:
    """Note when the first checkpoint is begun, on a disk that is full already."""
    save = saver.save

    def noted(*args: Any, **settings: Any) -> None:
        if not (folder / "damage").exists():
            (folder / "damage").write_text(repr(time.time()))
        save(*args, **settings)

    saver.save = noted


def train(place: Place, folder: Path, *args: Any) -> None:
    """Train with the fault planted in the process of its rank."""
    fault = json.loads(os.environ["GPIPE_FAULT"])
    num_restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if int(os.environ["RANK"]) == fault["rank"] and num_restarts < fault["times"]:
        _plant(fault["place"], fault["action"], Path.cwd())
    TRAIN(place, folder, *args)


def _plant(place: str, action: str, folder: Path) -> None:
    from gpipe.programs import build  # which the process that starts the others needs not load

    build_pipeline, build_trainer = build.build_pipeline, build.build_trainer

    def act() -> None:
        do(action, folder)

    def broken_pipeline(*args: Any) -> Any:
        pipeline = build_pipeline(*args)
        if place in ("forward", "backward", "evaluation"):
            in_layer(pipeline, place, act)
        return pipeline

    def broken_trainer(*args: Any) -> Any:
        trainer = build_trainer(*args)
        if place == "loading":
            in_loader(trainer.train_loader, act)
        elif place == "worker":
            samples = trainer.train_loader._images.dataset
            samples.transform = WorkerTransform(samples.transform, action, folder)
        elif action == "limit":  # a full disk, for one process alone
            (folder / "damage").write_text(repr(time.time()))
            bytes_left = 100 if trainer.pipeline.is_first else 2000  # the first process keeps the log
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, resource.RLIM_INFINITY))
        elif action == "note":
            before_save(trainer._saver, folder)
        elif place == "save":
            in_save(act)
        return trainer

    build.build_pipeline, build.build_trainer = broken_pipeline, broken_trainer


if __name__ == "__main__":
    # By its name in the package: what is pickled must be found again in the other processes.
    from tests.reliability import faulty_run

    run.train_in_process = faulty_run.train
    sys.argv = [str(ROOT / "train.py"), *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
