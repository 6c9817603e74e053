"""The settings of the pipeline and of the processes that it runs in."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from gpipe.config.checks import above, at_least, optional_at_least, require


class Rematerialize(Enum):
    """Which micro-batches' forward functions are recomputed for the backward pass."""

    always = "always"
    except_last = "except_last"
    never = "never"


# The order of a step's tasks. In a class statement no member could be called 1f1b.
PipelineSchedule = Enum("PipelineSchedule", {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved_1f1b": "interleaved_1f1b"})


class PartitionBy(Enum):
    """What makes a layer expensive.

    seconds: of forward, recomputation and backward, planned for the accelerator at hand. measured_seconds: the same,
    measured by the first process before training. memory: the cut with the lowest peak.
    """

    seconds = "seconds"
    measured_seconds = "measured_seconds"
    flops = "flops"
    parameter_bytes = "parameter_bytes"
    memory = "memory"


class Objective(Enum):
    """What the partitioning minimises.

    step: the simulated step, where costs are seconds; other costs cannot be simulated, and are balanced as by max.
    max: the most expensive partition. variance: the variance of the partitions' costs (the paper's rule).
    """

    step = "step"
    max = "max"
    variance = "variance"


class Device(Enum):
    """Where the stages compute; auto is CUDA where there is a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class PipelineConfig:
    """K stages, M micro-batches, and how the layers are cut into partitions.

    stages_per_device: how many stages a process or GPU has; more than 1 where the schedule is interleaved.
    memory_limit_bytes: the most that a device may need at its planned peak: parameters, gradients, optimiser state,
        boundary inputs and activations; null is no limit.
    partitions: the number of layers of each stage; null chooses them as partition_by and objective say.
    timeout_seconds: how long a stage waits for a silent neighbour.
    synchronize_batch_norm: whether batch norms normalise a micro-batch by its statistics over all launch.num_replicas
        replicas; with one replica, these are the statistics of the micro-batch, and it makes no difference.
    """

    num_stages: int = MISSING
    num_microbatches: int = MISSING
    schedule: PipelineSchedule = MISSING
    stages_per_device: int = MISSING
    rematerialize: Rematerialize = MISSING
    partition_by: PartitionBy = MISSING
    objective: Objective = MISSING
    memory_limit_bytes: int | None = MISSING
    partitions: list[int] | None = MISSING
    timeout_seconds: float = MISSING
    synchronize_batch_norm: bool = MISSING

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves; that K fits the layers is checked where these are known."""
        at_least("pipeline.num_stages", self.num_stages, 1)
        at_least("pipeline.num_microbatches", self.num_microbatches, 1)
        self._check_stages_per_device()
        above("pipeline.timeout_seconds", self.timeout_seconds, 0)
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
        else:
            others = f"1 with pipeline.schedule={self.schedule.name}; interleaved_1f1b takes more"
            require(number == 1, setting, number, others)


@dataclass
class LaunchConfig:
    """Processes: one that plays all stages, or one per stage and replica.

    num_threads: of each process; null shares the processor's cores out.
    pin_cores: true starts every process anew, even a single one, and on a CPU gives it as many cores of its own as it
        has threads, so that speeds can be compared.
    max_restarts: restarts allowed after a process has failed; the run goes on from its last checkpoint.
    debug: true shows the whole traceback of an error instead of one message.
    """

    num_processes: int = MISSING
    num_replicas: int = MISSING
    num_threads: int | None = MISSING
    pin_cores: bool = MISSING
    device: Device = MISSING
    max_restarts: int = MISSING
    debug: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that are wrong in themselves."""
        at_least("launch.num_processes", self.num_processes, 1)
        at_least("launch.num_replicas", self.num_replicas, 1)
        optional_at_least("launch.num_threads", self.num_threads, 1)
        at_least("launch.max_restarts", self.max_restarts, 0)
