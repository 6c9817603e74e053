"""Measure how long the first stage waits for gradients, with and without replicas.

    python -m experiments.replica_wait

Two stages of four sleeping layers, each with a weight of 16 MiB, in four processes over Gloo. Three variants take
turns: two independent pipelines; two replicas that average their gradients; and two replicas whose backward ends only
when its gradients are averaged, as with torch's DistributedDataParallel. The wait is the time of a step in which the
first stage has run all tasks that it can, and its next one is a backward. Four minutes.
"""

import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import gpipe
from experiments.engine_overhead.hand_written_loop import compute_loss
from experiments.engine_overhead.sleeping_layers import Sleeper
from experiments.processes import start
from experiments.program import StudyProgram, track
from gpipe.pipeline.shared.averaging import Averaging
from gpipe.pipeline.timeline import Timeline
from reproductions.bubble.overheads import REPLICA_WAIT

NUM_STAGES, NUM_LAYERS, NUM_MICROBATCHES = 2, 8, 4
FORWARD, BACKWARD = 0.02, 0.05  # seconds of a layer
WEIGHT = 1024, 4096
STEPS = 5  # of each turn; the first one does not count
ALONE, REPLICAS, IN_BACKWARD = "one replica", "two replicas", "two replicas, awaited in the backward"


class Heavy(nn.Module):
    """A sleeping layer whose weight has a large gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeper = Sleeper(FORWARD, BACKWARD)
        self.weight = nn.Parameter(torch.ones(WEIGHT))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sleeper's output, times one number of the weight."""
        found: Tensor = self.sleeper(x) * self.weight[0, 0]
        return found


class AwaitedInBackward(Averaging):
    """Ends a stage's last backward when the averages are there."""

    @contextmanager
    def reducing(self, awaited: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Average, and wait."""
        with super().reducing(awaited):
            yield
        self.reduce_all()
        self.wait()


def compute_wait(step: Timeline) -> float:
    """Return the seconds in which the first stage waited for a gradient."""
    events = sorted((event for event in step.events if event.task.stage == 0), key=lambda event: event.start)
    return sum(after.start - before.end for before, after in pairwise(events) if after.task.kind.makes_gradients)


def measure_process(mesh: DeviceMesh, case: str) -> list[float]:
    """Run the steps of one turn in one of four processes; return what it waited, step by step."""
    layers = nn.Sequential(*(Heavy() for _ in range(NUM_LAYERS)))
    partitions = [NUM_LAYERS // NUM_STAGES] * NUM_STAGES
    pipeline = gpipe.Pipeline(layers, compute_loss, partitions, NUM_MICROBATCHES, rematerialize="never", mesh=mesh)
    if case == IN_BACKWARD:
        for stage in pipeline.stages.values():
            stage.averaging = AwaitedInBackward(stage.layers, pipeline.job.replicas)
    batch = torch.randn(NUM_MICROBATCHES, 16), torch.randn(NUM_MICROBATCHES, 16)
    waits = []
    for _ in range(STEPS):
        for parameter in pipeline.parameters():
            parameter.grad = None
        timeline = pipeline.train_step(batch, record_timeline=True).timeline
        assert timeline is not None
        waits.append(compute_wait(timeline))
    dist.barrier()
    pipeline.close()
    return waits[1:]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the waits of each case, the median of each turn."""
    found: dict[str, list[float]] = {case: [] for case in (ALONE, REPLICAS, IN_BACKWARD)}
    for _ in track(range(rounds), "turns of the three cases"):
        for case, waits in found.items():
            num_replicas = 1 if case == ALONE else 2
            seconds = start(measure_process, NUM_STAGES, case, num_replicas=num_replicas, num_jobs=2 // num_replicas)
            waits.append(statistics.median(seconds))
    return found


if __name__ == "__main__":
    tables = {"bubble": REPLICA_WAIT.tables}
    program = StudyProgram(__doc__, tables, rounds=7, what_rounds_are=f"turns of each case, of {STEPS} steps")
    options = program.parse()
    config = {"num_stages": NUM_STAGES, "num_microbatches": NUM_MICROBATCHES, "rounds": options.rounds, "steps": STEPS}
    config |= {"forward_seconds": FORWARD, "backward_seconds": BACKWARD, "weight": list(WEIGHT)}
    program.publish_record(REPLICA_WAIT.make_record(config, {"wait_seconds": measure(options.rounds)}))
