"""The settings of the pipeline and of its processes."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from omegaconf import MISSING

from gpipe.config.checks import MOST_PROCESSES, Section, at_least, require, within

# Which micro-batches are recomputed in the backward pass; fit: those that do not fit into a device's memory.
RematerializeChoice = StrEnum("RematerializeChoice", ["always", "except_last", "never", "fit"])

# The order of a step's tasks.
PipelineSchedule = StrEnum("PipelineSchedule", ["gpipe", "1f1b", "interleaved_1f1b", "split_gpipe", "zb_h1", "zb_v"])

# The cost of a layer that the partitions balance.
# seconds: those of forward, recomputation and backward, planned for the accelerator at hand. measured_seconds: the
# same, measured by the first process before training. memory: the cut with the lowest peak. measured_memory: the same,
# with the temporary memory of operations on this processor, also measured.
PartitionBy = StrEnum(
    "PartitionBy", ["seconds", "measured_seconds", "flops", "parameter_bytes", "memory", "measured_memory"]
)

# What the partitioning minimises.
# step: the simulated step, if costs are seconds; other costs cannot be simulated, and are balanced as for max.
# max: the most expensive partition. variance: the variance of the partitions' costs (the paper's rule).
Objective = StrEnum("Objective", ["step", "max", "variance"])

Device = StrEnum("Device", ["auto", "cpu", "cuda"])  # where the stages compute; auto is CUDA if there is a GPU


@dataclass
class PipelineConfig(Section):
    """K stages, M micro-batches, and how the layers are cut into partitions.

    Attributes:
        num_stages: K.
        num_microbatches: M.
        schedule: the order of a step's tasks.
        stages_per_device: the number of stages per process or GPU: 2 or more with interleaved_1f1b, 2 with zb_v.
        rematerialize: which micro-batches are recomputed in the backward pass.
        partition_by: the cost of a layer that the partitions balance.
        objective: what the cut minimises.
        memory_limit_bytes: the most bytes of a device's planned peak, in training and in evaluations: parameters,
            gradients, optimiser state, boundary inputs and activations. null is no limit; for fit it is nine tenths of
            the device's memory.
        partitions: the number of layers of each stage; null cuts by partition_by and objective, within the limit.
        timeout_seconds: how long a stage waits for a silent neighbour.
        synchronize_batch_norm: whether batch norm normalises a micro-batch over all replicas.
        check_recomputation: fail with the name of the layer if a recomputation gives other outputs than the forward
            pass; it checks nothing if nothing is recomputed.
    """

    place: ClassVar[str] = "pipeline."
    num_stages: int = within(1, MOST_PROCESSES)
    num_microbatches: int = at_least(1)
    schedule: PipelineSchedule = MISSING
    stages_per_device: int = MISSING
    rematerialize: RematerializeChoice = MISSING
    partition_by: PartitionBy = MISSING
    objective: Objective = MISSING
    memory_limit_bytes: int | None = at_least(1)
    partitions: list[int] | None = MISSING
    timeout_seconds: float = within(1, 10**6)  # twelve days: Gloo and NCCL count milliseconds in 32 bits
    synchronize_batch_norm: bool = MISSING
    check_recomputation: bool | None = MISSING

    def __post_init__(self) -> None:
        """Check each value; the planner checks that K fits the layers."""
        super().__post_init__()
        self._check_stages_per_device()
        if self.partitions is not None:
            fits = len(self.partitions) == self.num_stages and min(self.partitions, default=0) >= 1
            expected = f"{self.num_stages} (pipeline.num_stages) numbers of layers, each 1 or more"
            require(fits, "pipeline.partitions", self.partitions, expected)

    def _check_stages_per_device(self) -> None:
        setting, number = "pipeline.stages_per_device", self.stages_per_device
        if self.schedule is PipelineSchedule["interleaved_1f1b"]:
            fits = number >= 2 and self.num_stages % number == 0
            require(fits, setting, number, f"2 or more, and a divisor of pipeline.num_stages={self.num_stages}")
        elif self.schedule is PipelineSchedule["zb_v"]:
            fits = number == 2 and self.num_stages % 2 == 0
            require(fits, setting, number, f"2, and an even pipeline.num_stages={self.num_stages}, with zb_v")
        else:
            others = f"1 with pipeline.schedule={self.schedule.name}; interleaved_1f1b and zb_v take more"
            require(number == 1, setting, number, others)


@dataclass
class LaunchConfig(Section):
    """The processes of a run: one for all stages, or one per stage and replica.

    Attributes:
        num_threads: threads per process; null divides the processor's cores among the processes.
        pin_cores: start a new process even for a single one, and on a CPU give each process its own cores, one per
            thread, so that speeds can be compared.
        max_restarts: restarts allowed after a failure, each from the last checkpoint; with more than 0, a single
            process runs as a child.
        shard_optimizer: each of R replicas keeps the optimiser's state of 1 / R of the parameters, and updates these
            for all. Checkpoints and results are the same. With one replica it changes nothing.
        device_threads: in training, if one process has several GPUs, launch the work of each from its own thread; null
            is false.
        gpus_per_node: the number of GPUs of a node of the cluster, for hydra/launcher=slurm; null assumes enough.
        debug: print the whole traceback of an error instead of one message.
    """

    place: ClassVar[str] = "launch."
    num_processes: int = within(1, MOST_PROCESSES)
    num_replicas: int = within(1, MOST_PROCESSES)
    num_threads: int | None = within(1, MOST_PROCESSES)
    pin_cores: bool = MISSING
    device: Device = MISSING
    max_restarts: int = at_least(0)
    shard_optimizer: bool = MISSING
    device_threads: bool | None = MISSING
    gpus_per_node: int | None = within(1, MOST_PROCESSES)
    debug: bool = False
