"""What the stages of a process exchange with the same stages of other replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from gpipe.pipeline.job.job import Job
from gpipe.pipeline.nothing import NOTHING
from gpipe.pipeline.shared.averaging import Averaging
from gpipe.pipeline.stage import Stage


def connect_stages(
    stages: Mapping[int, Stage], layers: nn.ModuleDict, job: Job, *, shards: bool, synchronizes: bool
) -> None:
    """Let stages average gradients over the replicas, or shard weights, and let batch norms exchange statistics."""
    if job.num_replicas == 1:
        return
    # Imported before the processes wait for each other.
    if shards:
        from gpipe.pipeline.shared.sharding import Sharding  # loads torch's distributed tensors
    if synchronizes:
        from gpipe.pipeline.shared.synchronized_norm import StatisticsExchange  # loads torch.compile's machinery
    for k, stage in stages.items():
        stage.averaging = (
            Sharding(stage.layers, job.replicas) if shards else Averaging(stage.layers, job.replicas, is_awaited=k > 0)
        )
    if synchronizes:
        exchange = StatisticsExchange(job.connect_replicas(), layers)
        for stage in stages.values():
            stage.exchange = exchange


def await_averages(stages: Iterable[Stage], job: Job) -> None:
    """Make what comes next wait for the averages of gradients over the replicas."""
    averagings = [stage.averaging for stage in stages if stage.averaging is not None]
    with job.activity.doing("averaging gradients over the replicas") if averagings else NOTHING:
        for averaging in averagings:
            averaging.wait()
        for averaging in averagings:
            averaging.finish_step()
