"""The GPUs and cores of this host, and the cores that a process is pinned to."""

import os


class DevicesMissing(RuntimeError):
    """This host has fewer GPUs or cores than the processes of a run need.

    Attributes:
        reason: how many are needed, and how many this host has.
    """

    def __init__(self, num_needed: int, noun: str, num_found: int, remedy: str) -> None:
        self.reason = f"needs {num_needed} {noun}, {num_found} {'is' if num_found == 1 else 'are'} here"
        super().__init__(f"this run {self.reason}: {remedy}.")


def check_devices(num_processes: int, device: str, num_threads: int | None, pin_cores: bool) -> None:
    """Check that there is a GPU for each of this host's processes; on a CPU, a core for each thread of pinned ones.

    torchrun's processes are not checked: whoever starts them decides. None counts as one thread per process.
    """
    if is_adopted():
        return
    if num_gpus := 0 if device == "cpu" else _num_gpus():
        if num_processes > num_gpus:
            remedy = "set launch.device=cpu, or launch.num_processes=1, which plays several stages on one GPU"
            raise DevicesMissing(num_processes, "GPUs", num_gpus, remedy)
        return
    num_cores = num_processes * (num_threads or 1)
    if pin_cores and num_cores > (found := len(own_cores())):
        raise DevicesMissing(num_cores, "cores", found, "set launch.pin_cores=false, which lets processes share a core")


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def count_threads(num_threads: int | None, num_processes: int) -> int:
    """Return the threads of each of this host's processes; None divides its cores among them."""
    return num_threads or max(1, len(own_cores()) // num_processes)


def pin(num_threads: int, local_rank: int) -> None:
    """Confine this thread, and those that it starts, to `num_threads` cores; neighbours get neighbouring cores.

    Raises:
        ValueError: the system cannot pin processes, or has too few cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("launch.pin_cores is true, but this system cannot pin processes: set launch.pin_cores=false.")
    cores = own_cores()
    own = cores[local_rank * num_threads : (local_rank + 1) * num_threads]
    if len(own) < num_threads:
        raise ValueError(
            f"launch.pin_cores is true, but process {local_rank} of this host finds {len(own)} of {num_threads} cores "
            "left: set launch.pin_cores=false, or start fewer processes."
        )
    os.sched_setaffinity(0, own)


def is_adopted() -> bool:
    """Return whether torchrun, or something that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()
