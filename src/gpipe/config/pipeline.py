"""The settings of the pipeline and of its processes."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from gpipe.config.checks import MOST_PROCESSES, at_least, optional_at_least, require, within


class RematerializeChoice(Enum):
    """Which micro-batches are recomputed in the backward pass; fit: those that do not fit into a device's memory."""

    always = "always"
    except_last = "except_last"
    never = "never"
    fit = "fit"


# The order of a step's tasks; in a class statement, no member could be called 1f1b.
PipelineSchedule = Enum(
    "PipelineSchedule",
    {
        "gpipe": "gpipe",
        "1f1b": "1f1b",
        "interleaved_1f1b": "interleaved_1f1b",
        "split_gpipe": "split_gpipe",
        "zb_h1": "zb_h1",
        "zb_v": "zb_v",
    },
)


class PartitionBy(Enum):
    """The cost of a layer that the partitions balance.

    seconds: those of forward, recomputation and backward, planned for the accelerator at hand. measured_seconds: the
    same, measured by the first process before training. memory: the cut with the lowest peak. measured_memory: the
    same, with the temporary memory of operations on this processor, also measured.
    """

    seconds = "seconds"
    measured_seconds = "measured_seconds"
    flops = "flops"
    parameter_bytes = "parameter_bytes"
    memory = "memory"
    measured_memory = "measured_memory"


class Objective(Enum):
    """What the partitioning minimises.

    step: the simulated step, if costs are seconds; other costs cannot be simulated, and are balanced as for max.
    max: the most expensive partition. variance: the variance of the partitions' costs (the paper's rule).
    """

    step = "step"
    max = "max"
    variance = "variance"


class Device(Enum):
    """Where the stages compute; auto is CUDA if there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class PipelineConfig:
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

    num_stages: int = MISSING
    num_microbatches: int = MISSING
    schedule: PipelineSchedule = MISSING
    stages_per_device: int = MISSING
    rematerialize: RematerializeChoice = MISSING
    partition_by: PartitionBy = MISSING
    objective: Objective = MISSING
    memory_limit_bytes: int | None = MISSING
    partitions: list[int] | None = MISSING
    timeout_seconds: float = MISSING
    synchronize_batch_norm: bool = MISSING
    check_recomputation: bool | None = MISSING

    def __post_init__(self) -> None:
        """Check each value; the planner checks that K fits the layers."""
        within("pipeline.num_stages", self.num_stages, 1, MOST_PROCESSES)
        at_least("pipeline.num_microbatches", self.num_microbatches, 1)
        self._check_stages_per_device()
        at_least("pipeline.timeout_seconds", self.timeout_seconds, 1)
        optional_at_least("pipeline.memory_limit_bytes", self.memory_limit_bytes, 1)
        if self.partitions is not None:
            fits = len(self.partitions) == self.num_stages and min(self.partitions, default=0) >= 1
            expected = f"{self.num_stages} (pipeline.num_stages) numbers of layers, each 1 or more"
            require(fits, "pipeline.partitions", self.partitions, expected)

    def _check_stages_per_device(self) -> None:
        setting, number = "pipeline.stages_per_device", self.stages_per_device
        if self.schedule is PipelineSchedule["interleaved_1f1b"]:
            at_least(setting, number, 2)
            divides = self.num_stages % number == 0
            require(divides, setting, number, f"a divisor of pipeline.num_stages={self.num_stages}")
        elif self.schedule is PipelineSchedule["zb_v"]:
            fits = number == 2 and self.num_stages % 2 == 0
            require(fits, setting, number, f"2, and an even pipeline.num_stages={self.num_stages}, with zb_v")
        else:
            others = f"1 with pipeline.schedule={self.schedule.name}; interleaved_1f1b and zb_v take more"
            require(number == 1, setting, number, others)


@dataclass
class LaunchConfig:
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

    num_processes: int = MISSING
    num_replicas: int = MISSING
    num_threads: int | None = MISSING
    pin_cores: bool = MISSING
    device: Device = MISSING
    max_restarts: int = MISSING
    shard_optimizer: bool = MISSING
    device_threads: bool | None = MISSING
    gpus_per_node: int | None = MISSING
    debug: bool = False

    def __post_init__(self) -> None:
        within("launch.num_processes", self.num_processes, 1, MOST_PROCESSES)
        within("launch.num_replicas", self.num_replicas, 1, MOST_PROCESSES)
        optional_at_least("launch.num_threads", self.num_threads, 1)
        within("launch.num_threads", self.num_threads or 1, 1, MOST_PROCESSES)
        at_least("launch.max_restarts", self.max_restarts, 0)
        within("launch.gpus_per_node", self.gpus_per_node or 1, 1, MOST_PROCESSES)
        optional_at_least("launch.gpus_per_node", self.gpus_per_node, 1)
